"""Numbers of published implementations (data/README.md says which), one adapter a family, and run.py, which compares."""


class NotCovered(Exception):
    """The package does not cover this case; the message is the reason."""
