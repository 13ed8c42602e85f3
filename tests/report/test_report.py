import json
import math
import os
import random
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from dataclasses import asdict, replace

import pytest

from megatron_grpo.report import RULES, check_run, read_run, write_report
from megatron_grpo.report.alerts import agreement
from megatron_grpo.report.page import page_data, recent, render, stacked, thinned
from megatron_grpo.report.watch import make_server
from tests.report.made_run import make_run, sample_line


def log(directory, *lines):
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "metrics.jsonl").write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return str(directory)


def line(step, seconds=None, **metrics):
    return {"step": step, "time": 100.0 + step, "metrics": metrics, "seconds": seconds or {}}


def series(tmp_path, name, values):
    return read_run(log(tmp_path / "run", *(line(i + 1, **{name: v}) for i, v in enumerate(values))))


def test_last_line_of_a_step_wins_per_metric(tmp_path):
    run = read_run(
        log(
            tmp_path,
            line(1, a=1.0),
            line(2, a=2.0, b=5.0),
            line(3, a=3.0),
            line(2, a=20.0),
            line(3, a=30.0),
            line(3, **{"eval/accuracy": 0.5}),
        )
    )
    assert run.metrics == {"a": {1: 1.0, 2: 20.0, 3: 30.0}, "b": {2: 5.0}, "eval/accuracy": {3: 0.5}}
    assert run.steps == [1, 2, 3] and run.resumes == [2]


def test_bad_lines_are_named_and_the_rest_is_kept(tmp_path):
    run = read_run(
        log(
            tmp_path,
            line(1, a=1.0),
            "{broken",
            "[1]",
            {"step": "x"},
            {"step": 2, "time": 1.0, "metrics": {"a": "high", "b": 2}},
            line(3, a=3.0),
        )
    )
    assert run.metrics == {"a": {1: 1.0, 3: 3.0}, "b": {2: 2.0}}
    assert [p.split(": ")[0] for p in run.problems] == [f"metrics.jsonl:{n}" for n in (2, 3, 4, 5)]
    assert "not JSON" in run.problems[0] and "'a' is 'high'" in run.problems[3]


def test_many_bad_lines_are_counted(tmp_path):
    run = read_run(log(tmp_path, *["{"] * 500, line(1, a=1.0)))
    assert len(run.problems) == 21 and run.problems[-1] == "and 480 more such lines" and run.metrics["a"] == {1: 1.0}


def test_a_line_cut_off_in_the_middle_is_named_as_such(tmp_path):
    log(tmp_path, line(1, a=1.0))
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": 2, "met')
    assert "metrics.jsonl:2: the last line is incomplete" in read_run(str(tmp_path)).problems[0]


def test_values_that_are_not_finite_leave_the_series_and_are_counted(tmp_path):
    directory = log(tmp_path, line(1, grad_norm=1.0), line(2, grad_norm=math.nan), line(3, grad_norm=math.inf), line(4, grad_norm=2.0))
    data = page_data([directory])["runs"][0]
    assert data["metrics"]["grad_norm"] == {"x": [1, 4], "y": [1.0, 2.0], "of": 2} and data["lost"] == [
        {"name": "grad_norm", "steps": [2, 3]}
    ]
    (alert,) = check_run(read_run(directory))
    assert alert.level == "note" and "2 of 4 steps, first at step 2, last at step 3" in alert.text


@pytest.mark.parametrize(
    "name, healthy, warn, bad",
    [
        ("mismatch_k3", 1.5e-3, 5e-3, 2e-2),
        ("mismatch_k1", 1.5e-3, 5e-3, 2e-2),
        ("mismatch_f2", 1e-4, 0.05, 0.2),
        ("mismatch_abs", 0.01, 0.07, 0.2),
        ("mismatch_ratio_ess", 0.95, 0.7, 0.3),
        ("ratio_ess", 0.95, 0.7, 0.3),
        ("clip_frac_high", 0.15, 0.3, 0.5),
        ("clip_frac_low", 0.15, 0.3, 0.5),
        ("groups/zero_std", 0.4, 0.6, 0.9),
        ("routing/router_mismatch", 0.1, 0.3, 0.7),
        ("routing/fallback", 0.0, 0.05, 0.5),
        ("samples/truncated", 0.1, 0.4, 0.7),
    ],
)
def test_thresholds(tmp_path, name, healthy, warn, bad):
    found = [
        [(a.level, a.metric) for a in check_run(series(tmp_path / str(i), name, [v] * 12))] for i, v in enumerate((healthy, warn, bad))
    ]
    assert found == [[], [("warn", name)], [("bad", name)]]


@pytest.mark.parametrize(
    "metrics, state, metric, text",
    [
        ({"mismatch_k3": [1e-3] * 12, "mismatch_f2": [1e-4] * 12}, "healthy", "mismatch_k3", "last 10 steps is 0.001, not over 0.003"),
        ({"mismatch_ratio_ess": [0.9] * 4}, "healthy", "mismatch_ratio_ess", "last 4 steps is 0.9, not under 0.8"),
        ({"mismatch_k3": [1e-3] * 5 + [0.5] + [1e-3] * 13}, "healthy", "mismatch_k3", "not over 0.003"),
        ({"mismatch_k3": [1e-3] * 12, "mismatch_f2": [0.05] * 12}, "watch", "mismatch_f2", "is 0.05, over 0.01"),
        ({"mismatch_k3": [2e-4 * 1.12**i for i in range(20)]}, "watch", "mismatch_k3", "median of the last fifth"),
        ({"mismatch_k3": [5e-3] * 12, "mismatch_ratio_ess": [0.3] * 12}, "broken", "mismatch_ratio_ess", "is 0.3, under 0.5"),
        ({"mismatch_k3": [2e-2] * 12, "clip_frac_high": [0.5] * 12}, "broken", "mismatch_k3", "is 0.02, over 0.01"),
        ({"clip_frac_high": [0.5] * 12}, "unknown", "mismatch_k3", "no finite value"),
        ({"mismatch_k3": [math.nan] * 12}, "unknown", "mismatch_k3", "no finite value"),
    ],
)
def test_verdict_on_the_engines(tmp_path, metrics, state, metric, text):
    steps = [line(i + 1, **dict(zip(metrics, values, strict=True))) for i, values in enumerate(zip(*metrics.values(), strict=True))]
    directory = log(tmp_path / "run", *steps)
    run = read_run(directory)
    verdict = agreement(run, check_run(run))
    assert (verdict.state, verdict.metric) == (state, metric) and text in verdict.text and verdict.advice
    assert page_data([directory])["runs"][0]["agreement"] == asdict(verdict)


def test_the_verdict_has_the_thresholds_of_the_alerts(tmp_path, monkeypatch):
    run = series(tmp_path, "mismatch_k3", [1e-3] * 12)
    monkeypatch.setattr("megatron_grpo.report.alerts.RULES", tuple(replace(r, warn=1e-4, bad=5e-4) for r in RULES if r.metric == "mismatch_k3"))
    assert agreement(run, check_run(run)).state == "broken" and [a.level for a in check_run(run)] == ["bad"]


def test_a_passing_spike_is_a_note(tmp_path):
    (alert,) = check_run(series(tmp_path, "mismatch_k3", [1e-3] * 5 + [0.5] + [1e-3] * 13))
    assert alert.level == "note" and alert.step == 6 and "on 1 of 19 steps" in alert.text


def test_rising_mismatch(tmp_path):
    assert [a.title for a in check_run(series(tmp_path / "a", "mismatch_k3", [2e-4 * 1.12**i for i in range(20)]))] == [
        "Mismatch with the engine is rising"
    ]
    assert check_run(series(tmp_path / "b", "mismatch_k3", [1e-12 * 2**i for i in range(20)])) == []  # far below anything that matters
    assert check_run(series(tmp_path / "c", "mismatch_k3", [1e-3, 1.2e-3] * 20)) == []


@pytest.mark.parametrize("end, level", [(0.5, None), (0.2, "warn"), (0.05, "bad")])
def test_entropy_collapse(tmp_path, end, level):
    run = series(tmp_path, "entropy", [0.8 + (0.8 * end - 0.8) * min(i / 15, 1) for i in range(25)])
    found = [a for a in check_run(run) if a.metric == "entropy"]
    assert [a.level for a in found] == ([level] if level else [])


def test_failed_samples_and_skipped_steps(tmp_path):
    run = read_run(
        log(
            tmp_path,
            *(
                line(i, **{"rollout/samples_generated": 100.0, "rollout/samples_failed": 5.0, "skipped": float(i == 3)})
                for i in range(1, 11)
            ),
        )
    )
    assert {(a.metric, a.level) for a in check_run(run)} == {("rollout/samples_failed", "warn"), ("skipped", "warn")}


def test_thinning_keeps_spikes_and_ends():
    points = [(i, 0.0) for i in range(10_000)]
    points[4321], points[777] = (4321, 9.0), (777, -9.0)
    kept = thinned(points, 100)
    assert (
        len(kept["x"]) <= 102
        and kept["of"] == 10_000
        and kept["x"] == sorted(set(kept["x"]))
        and (kept["x"][0], kept["x"][-1]) == (0, 9999)
    )
    assert kept["y"][kept["x"].index(4321)] == 9.0 and kept["y"][kept["x"].index(777)] == -9.0


def test_stacks_are_means_and_one_step_leaves_evaluations_out():
    phases = {"rollout": {1: 2.0, 2: 4.0, 3: 6.0}, "eval": {3: 10.0}}
    assert stacked(phases) == {"names": ["rollout", "eval"], "x": [1, 2, 3], "to": [1, 2, 3], "rows": [[2.0, 0.0], [4.0, 0.0], [6.0, 10.0]]}
    assert stacked(phases, bars=2) == {"names": ["rollout", "eval"], "x": [1, 3], "to": [2, 3], "rows": [[3.0, 0.0], [6.0, 10.0]]}
    assert recent(phases) == [["rollout", 4.0]]


def test_samples(tmp_path):
    make_run(tmp_path / "run", steps=200)
    good = sample_line(0, random.Random(0))
    (tmp_path / "run/samples/step_0000200.jsonl").write_text(
        json.dumps(good)
        + "\n"
        + '{"tokens": 3}\n'
        + json.dumps({"sample_id": 9, "reward": math.nan, "tokens": [{"text": "a", "logp": math.inf}]})
        + "\n"
    )
    run = read_run(str(tmp_path / "run"))
    assert len(run.samples) == 12 and len(run.sample_steps) == 20 and {10, 200} <= set(run.samples)
    first, last = run.samples[200]
    token = good["tokens"][0]
    assert first["tokens"][0] == ["Let us ", 1, *(float(f"{token[k]:.6g}") for k in ("logp", "old_logp", "rollout_logp"))]
    assert last["reward"] is None and last["tokens"] == [["a", 1, None, None, None]]
    assert run.problems == ["samples/step_0000200.jsonl:2: `tokens` is not a list"]


def test_long_responses_keep_both_ends(tmp_path):
    (tmp_path / "samples").mkdir()
    (tmp_path / "samples/step_0000001.jsonl").write_text(json.dumps({"tokens": [{"text": str(i)} for i in range(10_000)]}) + "\n")
    (sample,) = read_run(str(tmp_path)).samples[1]
    assert (
        sample["length"] == 10_000 and len(sample["tokens"]) == 4096 and (sample["tokens"][0][0], sample["tokens"][-1][0]) == ("0", "9999")
    )


def test_page_is_one_file_and_text_cannot_break_out(tmp_path):
    directory = log(tmp_path / "run", line(1, a=1.0))
    (tmp_path / "run/samples").mkdir()
    evil = "</script><script>alert(1)</script>\u2028<!--"
    (tmp_path / "run/samples/step_0000001.jsonl").write_text(json.dumps({"prompt": evil, "tokens": [{"text": evil}]}) + "\n")
    path = write_report([directory])
    assert (
        path == os.path.join(directory, "report.html")
        and os.listdir(directory).count("report.html") == 1
        and len(os.listdir(directory)) == 3
    )
    page = (tmp_path / "run/report.html").read_text(encoding="utf-8")
    assert evil not in page and page.count("</script>") == 2 and "/*" + "DATA*/" not in page
    assert not [word for word in ("src=", "@import", "url(", '<link rel="style') if word in page]
    text = page.split('type="application/json">')[1].split("</script>")[0]
    assert json.loads(text)["runs"][0]["samples"][0]["samples"][0]["prompt"] == evil


def test_a_written_report_survives_a_failing_one(tmp_path, monkeypatch):
    directory = log(tmp_path / "run", line(1, a=1.0))
    write_report([directory])
    before = (tmp_path / "run/report.html").read_text()
    monkeypatch.setattr("os.replace", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(OSError, match="No space left"):
        write_report([directory])
    assert (tmp_path / "run/report.html").read_text() == before and sorted(os.listdir(directory)) == ["metrics.jsonl", "report.html"]


def test_names_tell_runs_apart(tmp_path):
    runs = [log(tmp_path / a / "out", line(1, a=1.0)) for a in ("x", "y")]
    assert [r["name"] for r in page_data(runs)["runs"]] == ["x/out", "y/out"]
    assert [r["name"] for r in page_data([runs[0], runs[0]])["runs"]] == ["out", "out #2"]


def test_command_line_imports_nothing_heavy(tmp_path):
    directory, output = log(tmp_path / "run", line(1, a=1.0)), tmp_path / "page.html"
    code = (
        "import sys; from megatron_grpo.report.__main__ import main; rc = main(sys.argv[1:]); "
        "heavy = {'torch', 'numpy', 'megatron', 'aiohttp'} & set(sys.modules); assert not heavy, heavy; sys.exit(rc)"
    )
    done = subprocess.run([sys.executable, "-c", code, directory, "--output", str(output)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(output) and output.exists() and not os.path.exists(os.path.join(directory, "report.html"))


def test_missing_run_directory(tmp_path, capsys):
    from megatron_grpo.report.__main__ import main

    assert main([str(tmp_path / "nowhere")]) == 1
    assert "no run directory" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main([str(tmp_path), "--watch", "--output", "x.html"])


def test_a_directory_above_the_run(tmp_path, capsys):
    from megatron_grpo.report.__main__ import main

    directory = log(tmp_path / "demo" / "report", line(1, a=1.0))
    with pytest.raises(SystemExit):
        main([str(tmp_path)])
    assert f"did you mean {directory}?" in capsys.readouterr().err and not (tmp_path / "report.html").exists()
    assert read_run(str(directory)).name == os.path.join("demo", "report")


def test_watch_serves_loopback_only_and_tells_of_changes(tmp_path):
    directory = log(tmp_path / "run", line(1, a=1.0))
    server = make_server([directory], 0)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        assert server.server_address[0] == "127.0.0.1"

        def get(path, **headers):
            request = urllib.request.Request(f"http://127.0.0.1:{server.server_port}{path}", headers=headers)
            try:
                with urllib.request.urlopen(request, timeout=20) as answer:
                    return answer.status, answer.headers.get("ETag"), answer.read().decode()
            except urllib.error.HTTPError as error:
                return error.code, None, error.read().decode()

        assert '"poll":5.0' in get("/")[2]
        status, tag, text = get("/data")
        assert status == 200 and json.loads(text)["runs"][0]["last_step"] == 1
        assert get("/data", **{"If-None-Match": tag})[0] == 304
        log(tmp_path / "run", line(1, a=1.0), line(2, a=2.0))
        status, fresh, text = get("/data", **{"If-None-Match": tag})
        assert status == 200 and fresh != tag and json.loads(text)["runs"][0]["last_step"] == 2
        assert get("/", Host="evil.example")[0] == 403 and get("/other")[0] == 404
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def test_a_long_run_is_written_quickly_and_stays_small(tmp_path):
    names = [f"metric_{i}" for i in range(40)]
    text = "".join(
        json.dumps({"step": s, "time": float(s), "metrics": dict.fromkeys(names, s % 97 / 7), "seconds": {"train": 1.0}}) + "\n"
        for s in range(1500)
    )
    (tmp_path / "metrics.jsonl").write_text(text)
    page = render(page_data([str(tmp_path)]))
    assert len(page) < 1_000_000
