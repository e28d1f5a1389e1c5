"""`python -m producer`, the same as the `producer` command."""

from producer.cli.main import main

main()
