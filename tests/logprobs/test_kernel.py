"""The Triton kernels in Triton's interpreter, on CPU. scripts/gpu_check.sh runs the same comparison compiled, on a GPU."""

import multiprocessing
import os
import subprocess
import tempfile
from concurrent.futures import ProcessPoolExecutor
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from megatron_grpo.logprobs import vocab_parallel_logprob
from tests.logprobs.test_vocab_parallel import CASES, expected, make, ours

BLOCK = 32              # of the kernels under test: 48 columns are two blocks, 41 end within the second
FEW = dict(tokens=3)    # the interpreter takes some 50 ms a program


@pytest.fixture(scope="module")
def interpreter():
    """run(case, ranks) in two processes of their own: Triton reads the variable when it is imported, and stays as it is then."""
    with ProcessPoolExecutor(2, multiprocessing.get_context("spawn")) as executor, tempfile.TemporaryDirectory() as directory:
        os.environ["TRITON_INTERPRET"] = "1"
        try:
            for started in [executor.submit(os.getpid) for _ in range(2)]:
                started.result(timeout=120)
        finally:
            del os.environ["TRITON_INTERPRET"]
        yield lambda case, ranks=1: [future.result(timeout=240) for future in [
            executor.submit(on_rank, case, rank, ranks, f"{directory}/{case.__name__}") for rank in range(ranks)]]


def on_rank(case, rank, ranks, store):
    from megatron_grpo.logprobs import kernel
    kernel.BLOCK = BLOCK
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks, timeout=timedelta(seconds=120))
    try:
        return case()
    finally:
        dist.destroy_process_group()


def cases_on_one_rank():
    results = {}
    for name, case in CASES.items():
        logits, target, weights, kwargs = make(**case, **FEW)
        for dtype in (torch.float32, torch.bfloat16) if name in ("padded", "huge") else (torch.float32,):
            results[name, dtype] = ours(logits, target, weights, dtype, kernel=True, **kwargs)
    return results


def test_kernels_in_the_interpreter(interpreter):
    (results,) = interpreter(cases_on_one_rank)
    for (name, dtype), got in results.items():
        logits, target, weights, kwargs = make(**CASES[name], **FEW)
        want = expected(logits.to(dtype).double(), target, weights, **kwargs)
        assert got[0].dtype == torch.float32 and got[2].dtype == dtype
        for i, (g, w) in enumerate(zip(got, want, strict=True)):
            tolerance = 8e-3 if i > 1 and dtype == torch.bfloat16 else 3e-6
            torch.testing.assert_close(g.double(), w, rtol=tolerance, atol=3e-6, msg=lambda text: f"{name}, {dtype}, output {i}: {text}")


ON_TWO_RANKS = "mostly padding", "support"          # the second rank has no token; ids of either rank


def cases_on_two_ranks():
    results = {}
    for name in ON_TWO_RANKS:
        logits, target, weights, kwargs = make(**CASES[name], **FEW)
        own = logits.chunk(dist.get_world_size(), 1)[dist.get_rank()].contiguous()
        results[name] = ours(own, target, weights, torch.float32, kernel=True, tp_group=dist.group.WORLD, **kwargs)
    return results


def test_kernels_under_tensor_parallelism(interpreter):
    results = interpreter(cases_on_two_ranks, ranks=2)
    for name in ON_TWO_RANKS:
        logits, target, weights, kwargs = make(**CASES[name], **FEW)
        want = expected(logits.float().double(), target, weights, **kwargs)
        for own in (r[name] for r in results):
            torch.testing.assert_close([x.double() for x in own[:2]], list(want[:2]), rtol=3e-6, atol=3e-6)
        for i in (2, 3):
            torch.testing.assert_close(torch.cat([r[name][i] for r in results], 1).double(), want[i], rtol=3e-6, atol=3e-6)


def special_cases():
    logits, target, weights, _ = make(**FEW)
    logits = logits.float()
    leaf = logits.clone().requires_grad_()
    hidden = (leaf * 1)[:, ::2]                                 # columns apart: copied
    logp, _ = vocab_parallel_logprob(hidden, target // 2, inplace_grad=True, kernel=True)
    logp.sum().backward()
    apart = logp.detach(), leaf.grad[:, ::2]
    hidden = leaf * 1
    logp, _ = vocab_parallel_logprob(hidden, target, inplace_grad=True, kernel=True)
    loss = (logp * weights[0].float()).sum()
    (grad,) = torch.autograd.grad(loss, leaf, retain_graph=True)
    try:
        torch.autograd.grad(loss, leaf)
        error = None
    except RuntimeError as e:
        error = str(e)
    bad = logits.clone()
    bad[1, 3] = torch.nan
    empty = vocab_parallel_logprob(logits[:0], target[:0], kernel=True)[0]
    return apart, (grad, hidden.detach()), error, vocab_parallel_logprob(bad, target, kernel=True)[0], empty


def test_strided_in_place_nan_and_empty(interpreter):
    (((logp, strided_grad), (grad, hidden), error, with_nan, empty),) = interpreter(special_cases)
    logits, target, weights, _ = make(**FEW)
    want = expected(logits.float().double()[:, ::2], target // 2, torch.ones(2, 3))
    torch.testing.assert_close(logp.double(), want[0], rtol=3e-6, atol=3e-6)
    torch.testing.assert_close(strided_grad.double(), want[2], rtol=3e-6, atol=3e-6)
    want = expected(logits.float().double(), target, weights)
    torch.testing.assert_close(grad.double(), want[2], rtol=3e-6, atol=3e-6)
    assert torch.equal(grad, hidden)
    assert "modified by an inplace operation" in error
    assert with_nan.isnan().tolist() == [False, True, False] and empty.shape == (0,)


def keep_bits_of_wide_rows():
    logits, target, weights, kwargs = make(**FEW, width=200, keep=True)
    return ours(logits, target, weights, torch.float32, kernel=True, **kwargs)


def test_support_over_several_words(interpreter):
    """200 columns: seven words of 32 bits, the highest bit of a word included."""
    logits, target, weights, kwargs = make(**FEW, width=200, keep=True)
    (got,) = interpreter(keep_bits_of_wide_rows)
    for g, w in zip(got, expected(logits.float().double(), target, weights, **kwargs), strict=True):
        torch.testing.assert_close(g.double(), w, rtol=3e-6, atol=3e-6)


POINTERS = dict(logits="*bf16", out="*bf16", local="*i64", keep="*i32", **dict.fromkeys(
    ("maximum", "total", "mean", "target", "log_sum", "grad_logp", "grad_entropy"), "*fp32"))
ANY = ("columns", "words", "blocks", "scale")           # arguments that need not divide by 16


@pytest.mark.parametrize("name, options", [("_statistics", dict(WITH_KEEP=True, WITH_MEAN=True)),
                                           ("_gradient", dict(WITH_KEEP=True, WITH_ENTROPY=True))])
def test_kernels_compile_for_a_gpu_that_is_not_here(name, options, tmp_path):
    """For compute capability 9.0 (H100, H200), down to machine code: vector loads, and no register spilled to memory."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from megatron_grpo.logprobs import kernel

    fn, constants = getattr(kernel, name), options | dict(LEAST=kernel.FLOOR, BLOCK=kernel.BLOCK)
    names = fn.arg_names
    signature = {n: "constexpr" if n in constants else POINTERS.get(n, "fp32" if n == "scale" else "i32") for n in names}
    attributes = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(names) if n not in constants and n not in ANY}
    source = ASTSource(fn, signature, constexprs={(names.index(n),): v for n, v in constants.items()}, attrs=attributes)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=dict(num_warps=kernel.WARPS))
    assert "ld.global.v4.b32" in compiled.asm["ptx"]
    (tmp_path / "cubin").write_bytes(compiled.asm["cubin"])
    tool = triton.knobs.nvidia.cuobjdump.path
    usage = subprocess.run([tool, "-res-usage", tmp_path / "cubin"], capture_output=True, text=True, check=True)
    assert "STACK:0" in usage.stdout and "LOCAL:0" in usage.stdout
