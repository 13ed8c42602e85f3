"""Numbers of published implementations (data/README.md says which), one adapter a family, and run.py, which compares."""


class NotCovered(Exception):
    """The package does not cover this case; the message is the reason."""


def choose(table: dict, value, what: str):
    """What a word of a case stands for; NotCovered of a word that the adapter does not know."""
    if value not in table:
        raise NotCovered(f"{what} {value!r}: the adapter knows {', '.join(map(str, table))}")
    return table[value]


class Recorded(dict):
    """The inputs of a case, and which of them were looked at: an option that nobody reads must not pass for a covered one."""

    def __init__(self, data: dict, path: str = "inputs"):
        super().__init__({k: Recorded(v, f"{path}.{k}") if isinstance(v, dict) else v for k, v in data.items()})
        self.path, self.seen = path, set()

    def __getitem__(self, key):
        self.seen.add(key)
        if not super().__contains__(key):
            raise NotCovered(f"the case does not give {self.path}.{key}")
        return super().__getitem__(key)

    def get(self, key, default=None):
        self.seen.add(key)
        return super().get(key, default)

    def __contains__(self, key) -> bool:
        self.seen.add(key)
        return super().__contains__(key)

    def items(self):
        self.seen |= set(self)
        return super().items()

    def ignore(self, *keys: str) -> None:
        """These change nothing in this case."""
        self.seen |= set(keys)

    def unread(self) -> list[str]:
        """Paths of what was not looked at; of the mappings inside only where these were."""
        out = []
        for key, value in super().items():
            if key not in self.seen and value != {}:
                out.append(f"{self.path}.{key}")
            elif isinstance(value, Recorded):
                out += value.unread()
        return out
