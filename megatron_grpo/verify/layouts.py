"""`verify --all-layouts`: every axis of the layout and every algorithm of the table, on up to 8 ranks of this machine.

A layout is a value for each axis of AXES; a cell is a layout and an algorithm. By default every pair of values occurs in some cell, of
two axes or of an axis and an algorithm; with --quick every value of an axis, and every algorithm, occurs; with --full every cell.
"""

import itertools
import os
import tempfile
import time
from dataclasses import dataclass

import torch

from ..recipes import RECIPES
from ..settings import given
from ..trainer.flags import make_parser
from .command import quiet, tolerance
from .compare import compare, table
from .problem import OURS, one_rank, prepare, with_layout, without
from .ranks import LocalRanks, RankFailed
from .step import Case, take_steps

RANKS = 8
AXES = {
    "tp": ("1", "2"), "pp": ("1", "2", "2v2"), "cp": ("1", "2", "4"), "cp layout": ("zigzag", "contiguous"), "ep": ("1", "2"), "dp": ("1", "2"),
    "batch": ("packed", "padded"), "per-token loss": ("off", "on"), "recompute": ("off", "on"), "loss recompute": ("off", "on")}
FLAGS = {       # (axis, value) -> flags; values without an entry have none
    ("tp", "2"): "--tensor-model-parallel-size 2 --sequence-parallel", ("pp", "2"): "--pipeline-model-parallel-size 2",
    ("pp", "2v2"): "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2", ("cp", "2"): "--context-parallel-size 2",
    ("cp", "4"): "--context-parallel-size 4", ("cp layout", "contiguous"): "--cp-layout contiguous",
    ("ep", "2"): "--expert-model-parallel-size 2", ("batch", "padded"): "--qkv-format bshd",
    ("per-token loss", "on"): "--calculate-per-token-loss", ("loss recompute", "on"): "--recompute-loss-function",
    ("recompute", "on"): "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"}
BY_MICRO_BATCH = ("clip_cov", "kl_cov")                 # they choose tokens by the covariances of a micro-batch
EXTRA: dict[str, tuple[str, ...]] = {                   # what an algorithm needs beside its name
    "gdpo": ("--gdpo-reward-keys", "a", "b"),
    # a group's advantage is the same for every token of a sample: over one sample each covariance would be 0, and rounding would choose
    **dict.fromkeys(BY_MICRO_BATCH, ("--advantage-estimator", "reinforce_plus_plus", "--kl-coef", "0.1"))}


@dataclass(frozen=True)
class Layout:
    """`values` in the order of AXES."""

    values: tuple[str, ...]

    @property
    def pairs(self) -> frozenset:
        return frozenset(zip(AXES, self.values, strict=True))

    @property
    def ranks(self) -> int:
        value = dict(self.pairs)
        return int(value["tp"]) * int(value["pp"][0]) * int(value["cp"]) * int(value["dp"])

    @property
    def possible(self) -> bool:
        """Whether the ranks suffice, experts have ranks to be spread over, and each axis that is set acts."""
        value = dict(self.pairs)
        over = self.ranks // int(value["pp"][0])
        return self.ranks <= RANKS and over % int(value["ep"]) == 0 and (value["cp"] != "1" or value["cp layout"] == "zigzag")

    @property
    def flags(self) -> list[str]:
        value = dict(self.pairs)
        over, tp, ep = self.ranks // int(value["pp"][0]), int(value["tp"]), int(value["ep"])
        words = [w for pair in zip(AXES, self.values, strict=True) for w in FLAGS.get(pair, "").split()]
        return words + (["--expert-tensor-parallel-size", "1"] if over % (tp * ep) else [])

    def __str__(self) -> str:
        value = dict(self.pairs)
        sizes = [f"{axis}{value[axis]}" for axis in ("tp", "pp", "cp", "ep", "dp") if value[axis] != "1"]
        words = [value["cp layout"]] * (value["cp"] != "1") + [value["batch"]]
        words += [axis for axis in ("per-token loss", "recompute", "loss recompute") if value[axis] == "on"]
        return f"{' '.join(sizes) or 'one rank'}, {', '.join(words)}"


def every_layout() -> list[Layout]:
    """All that are possible."""
    return [layout for values in itertools.product(*AXES.values()) if (layout := Layout(values)).possible]


def covering(strength: int) -> list[Layout]:
    """Few layouts in which every possible combination of `strength` values occurs; greedily by what a layout adds for its ranks."""
    combinations = {layout: set(itertools.combinations(sorted(layout.pairs), strength)) for layout in every_layout()}
    missing, chosen = set().union(*combinations.values()), []
    while missing:
        best = max(combinations, key=lambda layout: len(combinations[layout] & missing) / (4 + layout.ranks))
        chosen.append(best)
        missing -= combinations[best]
    return chosen


def dealt(layouts: list[Layout], names: list[str], each_value: bool) -> dict[Layout, list[str]]:
    """Which algorithms run on which layout: each with every value of every axis, or each once."""
    cells: dict[Layout, list[str]] = {layout: [] for layout in layouts}
    for i, name in enumerate(names):
        missing = set().union(*(layout.pairs for layout in layouts)) if each_value else set(layouts[i % len(layouts)].pairs)
        turn = layouts[i % len(layouts):] + layouts[:i % len(layouts)]
        while missing:
            best = max(turn, key=lambda layout: len(layout.pairs & missing) / (4 + layout.ranks + len(cells[layout])))
            cells[best].append(name)
            missing -= best.pairs
    return {layout: own for layout, own in cells.items() if own}


def cases_of(names: list[str], turn: int = 0) -> list[Case]:
    """The steps for these algorithms: each on samples of all shapes, and two of them, by turns, on the even ones with auxiliary losses."""
    cases = [Case(_algorithm(name), single=name in BY_MICRO_BATCH) for name in names]
    others = [name for name in names if name not in BY_MICRO_BATCH]
    return cases + [Case(_algorithm(others[(turn + k) % len(others)]), single=True) for k in range(min(2, len(others)))]


def _algorithm(name: str) -> tuple[str, ...]:
    return ("--algorithm", name, *EXTRA.get(name, ()))


def all_layouts(argv: list[str]) -> int:
    """Run the layouts one after the other; prints a line each, and a table for the steps that fail. The exit code."""
    names = sorted(RECIPES) if (one := given("--algorithm", argv)) is None else [one]
    if "--full" in argv:
        cells = {layout: names for layout in every_layout()}
    else:
        quick = "--quick" in argv
        cells = dealt(covering(1 if quick else 2), names, each_value=not quick or one is not None)      # one name alone meets every value
    os.environ.setdefault("PYTHONWARNINGS", "ignore")       # of what the ranks import
    cuda = given("--platform", argv) != "cpu"
    pool = LocalRanks(min(RANKS, torch.cuda.device_count()) if cuda else RANKS, "cpu:gloo,cuda:nccl" if cuda else "gloo", quiet=True)
    try:
        with tempfile.TemporaryDirectory(prefix="verify-") as directory:
            with quiet():
                make_parser().parse_args(without(argv, *OURS))      # what is wrong with a flag is said here once; ranks are silent
                flags = prepare(directory, [*argv, "--algorithm", names[0], *EXTRA.get(names[0], ())])
            return verify_layouts(pool, flags, cells)
    finally:
        pool.close()


def verify_layouts(pool: LocalRanks, flags: list[str], cells: dict[Layout, list[str]]) -> int:
    """Print what each layout gives against one rank in float64; 1 if anything is out of tolerance, else 0."""
    started, bound = time.monotonic(), tolerance(flags)
    cells = {layout: own for layout, own in cells.items() if layout.ranks <= pool.size}
    steps = {layout: cases_of(own, turn) for turn, (layout, own) in enumerate(cells.items())}
    wanted = sorted({case for cases in steps.values() for case in cases}, key=str)
    reference = dict(zip(wanted, pool.run(take_steps, one_rank(flags), wanted, torch.float64, timeout=1200)[0], strict=True))
    ties = sum(result["near_ties"] for result in reference.values())
    compared = failed = 0
    for layout, cases in steps.items():
        try:
            results = pool.run(take_steps, with_layout(flags, layout.flags), cases, ranks=layout.ranks, timeout=600)[-1]
        except RankFailed as error:
            print(f"FAIL {layout}\n{error}", flush=True)
            failed += len(cases)
            continue
        found = [(case, compare(result, reference[case], bound)) for case, result in zip(cases, results, strict=True)]
        bad = [(case, lines) for case, lines in found if not all(line.ok for line in lines)]
        compared, failed = compared + len(found), failed + len(bad)
        print(f"{'FAIL' if bad else 'ok  '} {str(layout):<72} {len(found):>3} steps, largest error "
              f"{max(lines[-1].error for _, lines in found):.1e}  [{time.monotonic() - started:.0f} s]", flush=True)
        for case, lines in bad:
            print(f"  {' '.join(case.algorithm or ())}{', one even sample a micro-batch' if case.single else ''}\n{table(lines)}", flush=True)
    if failed and ties:
        print(f"{ties} choices of experts are so close that rounding may flip them: repeat with another --seed")
    print(f"verify: {'FAIL' if failed else 'PASS'}  {len(cells)} layouts, {compared - failed} steps equal those of one rank in float64, "
          f"{failed} do not", flush=True)
    return int(failed > 0)
