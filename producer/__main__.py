"""`python -m producer`, the same as the `producer` command."""

from producer.cli import main

main()
