"""tools/plot: what it reads, the numbers it draws, and what it says when there is nothing to draw."""

import json
import sys
from pathlib import Path

import imageio.v2 as imageio
import numpy as np
import pandas as pd
import pytest

from leanrl.support.errors import UsageError
from leanrl.tools import plot
from leanrl.tools.common import colors_of
from leanrl.tools.trials import REPOSITORY, running_mean


@pytest.fixture(autouse=True)
def few_resamples(monkeypatch):
    monkeypatch.setattr(plot, "REPS", 200)


def write_run(folder: Path, seed: int, returns, script="ppo", env_id="Hopper-v5", finished=True, **args) -> Path:
    """A run directory with one log point, of two episodes, for each of ``returns``; every third point lacks them."""
    run_dir = folder / f"{env_id}_{script}_{args.get('compile', False)}_{seed}"
    run_dir.mkdir(parents=True)
    facts = {"script": script, "args": {"env_id": env_id, "seed": seed, "compile": False, **args}}
    (run_dir / "args.json").write_text(json.dumps(facts))
    rows = []
    for i, value in enumerate(returns, start=1):
        row = {"charts/SPS": 100.0}
        rows.append({"global_step": 300 * i - 100, "charts/wall_seconds": 3 * i - 1.0, **row})
        values = {"charts/episodic_return": value, "charts/episodes": 2 * i}
        rows.append({"global_step": 300 * i, "charts/wall_seconds": 3.0 * i, **row, **values})
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    if finished:
        summary = {"global_step": 300 * len(returns), "sps": 120.0, "interrupted": False}
        # Of the episodes themselves, which the log points only know the means of.
        (run_dir / "summary.json").write_text(json.dumps({**summary, "episodic_return": returns[-1] + 0.5}))
    return run_dir


@pytest.fixture
def runs(tmp_path) -> Path:
    """A folder with runs of three seeds, whose returns are 0 to 9."""
    for seed in (1, 2, 3):
        write_run(tmp_path / "runs", seed, [float(i) for i in range(10)])
    return tmp_path / "runs"


def draw(*runs, out: Path, **args) -> str:
    """Calls the tool in this process; returns the markdown that it wrote."""
    assert plot.main(plot.Args(runs=tuple(str(run) for run in runs), out=out, **args)) == 0
    return Path(f"{out}.md").read_text()


def cells(markdown: str, *names: str) -> list[str]:
    """The cells of the one table row that contains all ``names``."""
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in markdown.splitlines()]
    (row,) = [row for row in rows if all(name in row for name in names)]
    return row


# ------------------------------------------------------------------------------------------------------------ READING


def end_of_run(run_dir: Path, episodes: int) -> tuple[float, float]:
    """What the tool takes for the return that the run reached, and the mean of its last episodes."""
    (curve,) = plot.read_run(run_dir)
    return plot.end(curve), running_mean(curve["episodic_return"], curve["episodes"], episodes)[-1]


def test_a_run_is_read_as_it_was_written_up_to_its_last_whole_line(tmp_path):
    run_dir = write_run(tmp_path, 3, [10, 20, 40], compile=True, amp="bf16")
    (curve,) = plot.read_run(run_dir)
    assert curve["episodic_return"].tolist() == [10, 20, 40] and end_of_run(run_dir, 4) == (40.5, 30.0)
    assert curve[["sps", "final", "finished"]].iloc[-1].tolist() == [120.0, 40.5, True]
    # cudagraphs: as --one-graph leaves it.
    assert plot.mode_of({"compile": True, "cudagraphs": True, "one_graph": True}) == "compile+one-graph"
    with open(run_dir / "metrics.jsonl", "a") as file:
        file.write('{"global_step": 1200, "charts/episodic_re')
    before_a_resume = {"global_step": 600, "sps": 1.0, "interrupted": True, "episodic_return": -1.0}
    (run_dir / "summary.json").write_text(json.dumps(before_a_resume))
    (curve,) = plot.read_run(run_dir)
    assert len(curve) == 3 and curve["sps"].iloc[0] == 100.0
    assert end_of_run(run_dir, 4) == (pytest.approx(70 / 3), 30.0)
    assert cells(draw(run_dir, out=tmp_path / "p"), "ppo:compile+bf16")[2] == "1 (1 unfinished)"
    header, *_, last = (tmp_path / "p.csv").read_text().splitlines()
    facts = "run,script,mode,env_id,seed,global_step,wall_seconds,episodic_return,episodes,sps,final,finished"
    assert header == facts and last == f"{run_dir},ppo,compile+bf16,Hopper-v5,3,900,9.0,40.0,2,100.0,,0"


def test_what_cannot_be_read_is_told_in_one_line_and_left_out(runs, tmp_path, capsys):
    table = tmp_path / "table.csv"
    for name, content in (("torn", '{"script": '), ("empty", ""), ("list", "[]")):
        (runs / name).mkdir()
        (runs / name / "args.json").write_text(content)
    (write_run(runs, 4, [10, 20]) / "metrics.jsonl").write_text("")
    (write_run(runs, 5, [10, 20]) / "metrics.jsonl").write_bytes(b"\xff\x00\n")
    table.write_text("run,script\n1,2\n")
    csvs = table, tmp_path / "missing.csv"
    assert cells(draw(runs, out=tmp_path / "p", csv=csvs), "ppo:eager")[2] == "3"
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 7, lines
    for name in ("torn", "empty", "list", "_4", "_5", "'mode'", "missing.csv"):
        assert sum(name in line for line in lines) == 1, name
    with pytest.raises(UsageError, match=r"nothing to draw, 2 unreadable: .*table.csv: cannot be read"):
        draw(out=tmp_path / "p", csv=csvs)


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ([], "name run directories"),
        (["nowhere"], "nowhere: no run directory there"),
        (["--timeline", "0", "runs"], "--timeline 0: must be at least 1"),
        (["--timeline", "1"], "name some"),
        (["runs", "--out", "file/p"], "--out file/p: cannot be written"),
        (["runs", "--env-ids", "Ant-v5"], "no run has it; choose from Hopper-v5"),
        (["runs", "--max-steps", "299"], "is before the first log point"),
    ],
)
def test_bad_input_is_one_line(words, reason, runs, tmp_path, monkeypatch, refusal):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    assert reason in refusal(plot, *words)
    assert {path.name for path in tmp_path.iterdir()} == {"runs", "file"}


def test_without_rliable_the_remedy_is_told(runs, tmp_path, monkeypatch, refusal):
    monkeypatch.setitem(sys.modules, "rliable.library", None)
    said = refusal(plot, runs, "--out", tmp_path / "p")
    assert "rliable" in said and "pip install -r requirements/requirements-dev.txt" in said


# ---------------------------------------------------------------------------------------------------------- ESTIMATES


def test_running_mean_is_the_mean_over_the_last_episodes():
    rng = np.random.default_rng(0)
    curve = pd.DataFrame({"value": rng.normal(size=40), "episodes": rng.integers(1, 9, size=40)})
    each = np.repeat(curve["value"], curve["episodes"])
    for window in (1, 7, 50, 10_000):
        expected = [each[:end][-window:].mean() for end in np.cumsum(curve["episodes"])]
        np.testing.assert_allclose(running_mean(curve["value"], curve["episodes"], window), expected, rtol=1e-9)


def test_estimates_are_rliables(monkeypatch):
    from rliable.metrics import aggregate_iqm

    for seeds in (1, 2, 3, 5, 10):
        scores = np.random.default_rng(seeds).normal(size=(seeds, 6))
        iqm, *_ = plot.estimate_iqm(scores)
        np.testing.assert_allclose(iqm, [aggregate_iqm(column[:, None]) for column in scores.T])
    # One resample in 27 has the smallest only: more than the 2.5 % below the interval. The same for the largest.
    monkeypatch.setattr(plot, "REPS", 2000)
    assert [x.item() for x in plot.estimate_iqm(np.array([[1.0], [2.0], [6.0]]))] == [3.0, 1.0, 6.0]


def test_iqm_of_eight_seeds_is_the_mean_of_the_middle_four(tmp_path, capsys):
    # 300, 400, 600 and 700 in the middle; constant curves, so that no smoothing and no interpolation changes them.
    levels = [-1000.0, 100.0, 300.0, 400.0, 600.0, 700.0, 800.0, 9000.0]
    for seed, level in enumerate(levels):
        write_run(tmp_path / "runs", seed, [level] * 5)
    row = cells(draw(tmp_path / "runs", out=tmp_path / "p"), "ppo:eager")
    assert row[:4] == ["Hopper-v5", "ppo:eager", "8", "1,500"]
    # Final returns come from summary.json, which says half a point more.
    assert row[4] == f"{round(np.mean(levels) + 0.5, -2):,.0f} ± {round(np.std(levels, ddof=1), -2):,.0f}"
    assert row[5].startswith("500 [") and row[6] == "120 ± 0"
    assert capsys.readouterr().err == ""


def test_numbers_have_the_digits_that_their_spread_allows():
    told = {(4386, 1294): "2,800 ± 2,200", (501, 476): "488 ± 18", (499.2, 499.1): "499.1 ± 0.1", (6208,): "6,210"}
    assert {values: plot.mean_std(values) for values in told} == told


def test_overlap():
    def band(low: list, high: list, start: float = 0.0) -> plot.Band:
        low, high = np.array(low, float), np.array(high, float)
        return plot.Band(np.array([start, start + 1]), (low + high) / 2, low, high)

    flat = band([-1, -1], [1, 1])
    # The third leaves the flat one half way, the last one is elsewhere.
    others = flat, band([1.5, 1.5], [2, 2]), band([0, 2], [3, 3]), band([-1, -1], [1, 1], start=5)
    assert [plot.overlap(flat, other) for other in others] == [1.0, 0.0, pytest.approx(0.5, abs=0.01), None]


# ----------------------------------------------------------------------------------------------------------- PICTURES


def test_groups_and_what_makes_them_weak(tmp_path, capsys):
    for seed, length in ((1, 4), (2, 8), (3, 10)):
        write_run(tmp_path, seed, [float(i) for i in range(length)])
        write_run(tmp_path, seed, [seed + 100.0] * 4, script="sac")
        write_run(tmp_path / f"{seed}", seed % 2, [1.0], env_id="Walker2d-v5", num_envs=seed, run_name=f"{seed}")
    finals, overlaps = draw(tmp_path, out=tmp_path / "p").split("\n\n")[:2]
    assert cells(finals, "Hopper-v5", "ppo:eager")[2:4] == ["3", "1,200"]
    assert cells(overlaps, "ppo:eager") == ["Hopper-v5", "ppo:eager", "sac:eager", "0%"]
    told = capsys.readouterr().err.splitlines()
    weak = "more than once", "differ in num_envs", "drawn to step 1,200"
    assert len(told) == len(weak) and all(any(words in line for line in told) for words in weak)
    band = plot.estimate_band(plot.read_curves([str(tmp_path / "Hopper-v5_ppo*")], []), "global_step")
    assert (band.x[0], band.x[-1]) == (300, 1200)
    # Curves of different lengths are the same line where all have been: the mean of all episodes so far.
    np.testing.assert_allclose(band.iqm, (band.x / 300 - 1) / 2)


def test_csv_gives_the_same_numbers_back(tmp_path):
    source = REPOSITORY / "doc" / "benchmarks" / "cleanba" / "pong.csv"
    draw(csv=(source,), out=tmp_path / "pong")
    written, read = (pd.read_csv(path) for path in (tmp_path / "pong.csv", source))
    pd.testing.assert_frame_equal(written, read, check_dtype=False, check_exact=True)
    picture = imageio.imread(tmp_path / "pong.png")
    for color in colors_of(written["script"] + ":" + written["mode"]).values():  # each group's line is there
        rgb = [int(color[i : i + 2], 16) for i in (1, 3, 5)]
        assert (picture[..., :3] == rgb).all(-1).sum() > 1000


def test_some_of_it_alone(runs, tmp_path, capsys):
    """The first steps, without wall clock, of one environment."""
    write_run(runs, 1, [1.0] * 4, env_id="Walker2d-v5")
    some = {"out": tmp_path / "first", "max_steps": 1_300, "wall_clock": False, "env_ids": ("Hopper-v5",)}
    table = draw(runs, **some)
    # Four log points, 0 to 3; the runs' own final returns are of later steps. No speed without wall clock.
    assert cells(table, "ppo:eager")[3:] == ["1,200", "1.5 ± 0.0", "1.5 [1.5, 1.5]"]
    assert len((tmp_path / "first.csv").read_text().splitlines()) == 1 + 3 * 4
    height, width, _ = imageio.imread(tmp_path / "first.png").shape
    assert height < 0.6 * width and capsys.readouterr().err == ""
    late = write_run(runs, 4, [float(i) for i in range(10)]) / "metrics.jsonl"
    late.write_text("".join(late.read_text().splitlines(keepends=True)[8:]))
    assert draw(runs, **some) == table
    assert "1 of 4 runs left out: no log point before --max-steps" in capsys.readouterr().err


# ---------------------------------------------------------------------------------------------------------- TIMELINES


def test_timeline_counts_and_draws(tmp_path, capsys):
    run_dir = write_run(tmp_path, 1, [1.0])
    spans = [
        {"learner 0 (rank 0)": [["wait for rollouts", 10.0, 11.0], ["update", 11.0, 13.0]]},
        {"learner 0 (rank 0)": [["wait for rollouts", 13.0, 13.5], ["update", 13.5, 14.0]]},
    ]
    lines = [json.dumps({"update": i, "global_step": i, "spans": s}) + "\n" for i, s in enumerate(spans)]
    (run_dir / "timeline.jsonl").write_text("".join(lines) + '{"torn')
    assert plot.read_spans(run_dir, 10)["learner 0 (rank 0)"][2] == ("wait for rollouts", 3.0, 3.5)
    # 1.5 of 4 seconds, and half of the last one.
    for last, share in ((10, "38%"), (1, "50%")):
        assert plot.main(plot.Args(runs=(str(tmp_path),), timeline=last)) == 0
        assert (run_dir / "timeline.png").stat().st_size > 5_000
        assert cells(capsys.readouterr().out, "wait for rollouts") == ["learner 0 (rank 0)", "wait for rollouts", share]


DAMAGED = ["{}", "garbage", '{"spans": 3}', '{"spans": {}}', '{"spans": {"x": 5}}', '{"spans": {"x": [["a", 1]]}}']


@pytest.mark.parametrize("content", [None, "", *(f"{line}\n" for line in DAMAGED)])
def test_timeline_of_what_has_none(tmp_path, content):
    if content is not None:
        (tmp_path / "timeline.jsonl").write_text(content)
    with pytest.raises(UsageError, match=r"timeline\.jsonl"):
        plot.read_spans(tmp_path, 10)
