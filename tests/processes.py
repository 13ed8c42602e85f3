"""What tests ask the operating system about processes."""

import time


def alive(pid: int) -> bool:
    """Whether there is such a process, and not only its zombie."""
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def ends(pid: int, seconds: float = 20) -> bool:
    """Whether the process is gone within this time."""
    deadline = time.monotonic() + seconds
    while alive(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not alive(pid)
