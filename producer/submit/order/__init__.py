"""Orders requests so that equal prefixes run one after the other."""
