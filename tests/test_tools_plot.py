"""tools/plot: what it reads, the numbers it draws, and what it says when there is nothing to draw."""

import json
import subprocess
import sys
from pathlib import Path

import imageio.v2 as imageio
import numpy as np
import pytest

from leanrl.support.errors import UsageError
from leanrl.tools import plot
from leanrl.tools.common import COLORS

REPS = 200


def write_run(folder: Path, seed: int, returns, script="ppo", env_id="Hopper-v5", finished=True, **args) -> Path:
    """A run directory with one log point, of two episodes, for each of ``returns``; every third point lacks them."""
    run_dir = folder / f"{env_id}_{script}_{args.get('compile', False)}_{seed}"
    run_dir.mkdir(parents=True)
    facts = {"script": script, "args": {"env_id": env_id, "seed": seed, "compile": False, **args}}
    (run_dir / "args.json").write_text(json.dumps(facts))
    rows = []
    for i, value in enumerate(returns, start=1):
        row = {"charts/SPS": 100.0, "losses/value_loss": 1.0 / i}
        rows.append({"global_step": 300 * i - 100, "charts/wall_seconds": 3 * i - 1.0, **row})
        values = {"charts/episodic_return": value, "charts/episodes": 2 * i}
        rows.append({"global_step": 300 * i, "charts/wall_seconds": 3.0 * i, **row, **values})
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    if finished:
        summary = {"global_step": 300 * len(returns), "sps": 120.0, "interrupted": False}
        # Of the episodes themselves, which the log points only know the means of.
        (run_dir / "summary.json").write_text(json.dumps({**summary, "episodic_return": returns[-1] + 0.5}))
    return run_dir


def draw(*runs, out: Path, **args) -> str:
    """Calls the tool in this process; returns the markdown that it wrote."""
    assert plot.main(plot.Args(runs=tuple(str(run) for run in runs), out=out, reps=REPS, **args)) == 0
    return out.with_suffix(".md").read_text()


def cells(markdown: str, *names: str) -> list[str]:
    """The cells of the one table row that contains all ``names``."""
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in markdown.splitlines()]
    (row,) = [row for row in rows if all(name in row for name in names)]
    return row


# ------------------------------------------------------------------------------------------------------------ READING


def test_a_run_is_read_as_it_was_written(tmp_path):
    (curve,) = plot.read_run(write_run(tmp_path, 3, [10, 20, 40], compile=True, amp="bf16"), plot.RETURN)
    assert (curve.script, curve.mode, curve.env_id, curve.seed) == ("ppo", "compile+bf16", "Hopper-v5", 3)
    # cudagraphs: as --one-graph leaves it.
    assert plot.mode_of({"compile": True, "cudagraphs": True, "one_graph": True}) == "compile+one-graph"
    assert plot.mode_of({"compile": False, "cudagraphs": True, "one_graph": False}) == "cudagraphs"
    assert curve.global_step.tolist() == [300, 600, 900]
    assert curve.wall_seconds.tolist() == [3, 6, 9]
    assert curve.values.tolist() == [10, 20, 40]
    assert curve.episodes.tolist() == [2, 2, 2]
    assert (curve.finished, curve.end(100), curve.sps) == (True, 40.5, 120.0)


def test_a_run_under_way_is_drawn_up_to_its_last_whole_line(tmp_path):
    run_dir = write_run(tmp_path, 1, [10, 20, 40], finished=False)
    with open(run_dir / "metrics.jsonl", "a") as file:
        file.write('{"global_step": 1200, "charts/episodic_re')
    (curve,) = plot.read_run(run_dir, plot.RETURN)
    assert curve.values.tolist() == [10, 20, 40]
    # The last 4 episodes: 2 of mean 20, 2 of mean 40.
    assert (curve.finished, curve.end(4), curve.sps) == (False, 30.0, 100.0)
    assert cells(draw(run_dir, out=tmp_path / "p"), "ppo:eager")[2] == "1 (1 unfinished)"


def test_a_summary_from_before_a_resume_does_not_count(tmp_path):
    run_dir = write_run(tmp_path, 1, [10, 20, 40])
    summary = {"global_step": 600, "sps": 1.0, "interrupted": True, "episodic_return": -1.0}
    (run_dir / "summary.json").write_text(json.dumps(summary))
    (curve,) = plot.read_run(run_dir, plot.RETURN)
    assert (curve.finished, curve.final, curve.sps) == (False, None, 100.0)


def test_running_mean_is_the_mean_over_the_last_episodes():
    rng = np.random.default_rng(0)
    values, episodes = rng.normal(size=40), rng.integers(1, 9, size=40)
    each = np.repeat(values, episodes)
    for window in (1, 7, 50, 10_000):
        expected = [each[:end][-window:].mean() for end in np.cumsum(episodes)]
        np.testing.assert_allclose(plot.running_mean(values, episodes, window), expected, rtol=1e-9)


def test_what_cannot_be_read_is_told_in_one_line_and_left_out(tmp_path, capsys):
    runs = tmp_path / "runs"
    for seed in (1, 2, 3):
        write_run(runs, seed, [10, 20])
    for name, content in (("torn", '{"script": '), ("empty", ""), ("list", "[]")):
        (runs / name).mkdir()
        (runs / name / "args.json").write_text(content)
    (write_run(runs, 4, [10, 20]) / "metrics.jsonl").write_text("")
    (write_run(runs, 5, [10, 20]) / "metrics.jsonl").write_bytes(b"\xff\x00\n")
    assert cells(draw(runs, tmp_path / "nowhere", out=tmp_path / "p"), "ppo:eager")[2] == "3"
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 6, lines
    for name in ("torn", "empty", "list", "_4", "_5", "nowhere"):
        assert sum(name in line for line in lines) == 1, name


# ---------------------------------------------------------------------------------------------------------- ESTIMATES


def test_iqm_of_columns_is_rliables(tmp_path):
    from rliable.metrics import aggregate_iqm

    for seeds in (1, 2, 3, 5, 10):
        scores = np.random.default_rng(seeds).normal(size=(seeds, 1, 6))
        expected = [aggregate_iqm(scores[..., i]) for i in range(6)]
        np.testing.assert_allclose(plot.iqm_of_columns(scores), expected)


def test_interval_of_three_seeds_is_their_range():
    # One resample in 27 has the smallest only: more than the 2.5 % below the interval. The same for the largest.
    iqm, low, high = plot.estimate_iqm(np.array([[1.0], [2.0], [6.0]]), reps=2000)
    assert (iqm.item(), low.item(), high.item()) == (3.0, 1.0, 6.0)


def test_iqm_of_eight_seeds_is_the_mean_of_the_middle_four(tmp_path, capsys):
    # 3, 4, 5 and 6 in the middle; constant curves, so that no smoothing and no interpolation changes them.
    levels = [-1000.0, 1.0, 3.0, 4.0, 5.0, 6.0, 50.0, 9000.0]
    for seed, level in enumerate(levels):
        write_run(tmp_path / "runs", seed, [level] * 5)
    table = draw(tmp_path / "runs", out=tmp_path / "p")
    row = cells(table, "ppo:eager")
    # Final returns come from summary.json, which says half a point more.
    assert row[:4] == ["Hopper-v5", "ppo:eager", "8", "1,500"]
    assert row[4] == f"{np.mean(levels) + 0.5:,.1f} ± {np.std(levels, ddof=1):,.1f}"
    assert row[5].startswith("5.0 [") and row[6] == "120 ± 0"
    assert capsys.readouterr().err == ""

    curves, _ = plot.read_curves([str(tmp_path / "runs")], [], plot.RETURN)
    for axis, end in (("global_step", 1500), ("wall_seconds", 15)):
        band = plot.estimate_band(curves, axis, window=100, reps=REPS)
        assert (band.x[0], band.x[-1]) == (end / 5, end)
        np.testing.assert_allclose(band.iqm, 4.5)
        assert (band.low <= band.iqm).all() and (band.iqm <= band.high).all()


def test_curves_of_different_lengths_are_drawn_where_all_have_been(tmp_path, capsys):
    for seed, length in ((1, 4), (2, 8), (3, 10)):
        write_run(tmp_path, seed, [float(i) for i in range(length)])
    curves, _ = plot.read_curves([str(tmp_path)], [], plot.RETURN)
    band = plot.estimate_band(curves, "global_step", window=2, reps=REPS)
    assert (band.x[0], band.x[-1]) == (300, 1200)
    # With a window of one log point all three are the same line.
    np.testing.assert_allclose(band.iqm, band.x / 300 - 1)
    plot.warn_of_weaknesses(plot.group_curves(curves, []))
    assert "drawn to step 1,200" in capsys.readouterr().err


def band(low, high) -> plot.Band:
    x = np.linspace(0, 1, len(low))
    return plot.Band(x, (np.array(low) + high) / 2, np.array(low, float), np.array(high, float))


def test_overlap():
    flat = band([-1, -1], [1, 1])
    assert plot.overlap(flat, flat) == 1.0
    assert plot.overlap(flat, band([1.5, 1.5], [2, 2])) == 0.0
    # Leaves the flat one half way.
    assert plot.overlap(flat, band([0, 2], [3, 3])) == pytest.approx(0.5, abs=0.01)
    elsewhere = plot.Band(flat.x + 5, flat.iqm, flat.low, flat.high)
    assert plot.overlap(flat, elsewhere) is None


def test_overlap_table_compares_groups_of_one_environment(tmp_path):
    for seed in (1, 2, 3):
        write_run(tmp_path, seed, [seed, seed + 1.0])
        write_run(tmp_path, seed, [seed, seed + 1.0], compile=True)
        write_run(tmp_path, seed, [seed + 100.0, seed + 100.0], script="sac")
        write_run(tmp_path, seed, [seed, seed + 1.0], env_id="Walker2d-v5")
    overlaps = draw(tmp_path, out=tmp_path / "p").split("\n\n")[1]
    assert cells(overlaps, "ppo:eager", "ppo:compile") == ["Hopper-v5", "ppo:eager", "ppo:compile", "100%"]
    assert cells(overlaps, "ppo:eager", "sac:eager")[-1] == "0%"
    assert cells(overlaps, "ppo:compile", "sac:eager")[-1] == "0%"
    assert "Walker2d-v5" not in overlaps


# ------------------------------------------------------------------------------------------------- FILES AND MESSAGES


def test_csv_draws_the_same_numbers_and_the_same_picture(tmp_path, capsys):
    rng = np.random.default_rng(0)
    for seed in (1, 2, 3):
        write_run(tmp_path / "runs", seed, rng.normal(size=20) / 3)
        write_run(tmp_path / "runs", seed, rng.normal(size=15) / 3, compile=True, finished=seed < 3)
    first, again = tmp_path / "first", tmp_path / "again"
    draw(tmp_path / "runs", out=first)
    draw(csv=(first.with_suffix(".csv"),), out=again)
    for suffix in (".md", ".csv"):
        assert first.with_suffix(suffix).read_text() == again.with_suffix(suffix).read_text()
    picture = imageio.imread(first.with_suffix(".png"))
    np.testing.assert_array_equal(picture, imageio.imread(again.with_suffix(".png")))
    # Each group's line is there, in its colour.
    for color in COLORS[:2]:
        rgb = [int(color[i : i + 2], 16) for i in (1, 3, 5)]
        assert (picture[..., :3] == rgb).all(-1).sum() > 1000
    assert str(first.with_suffix(".png")) in capsys.readouterr().out

    header, *rows = first.with_suffix(".csv").read_text().splitlines()
    identity = "run,script,mode,env_id,seed"
    assert header == f"{identity},global_step,wall_seconds,episodic_return,episodes,sps,final,finished"
    assert len(rows) == 3 * 20 + 3 * 15


def test_the_first_steps_alone_without_wall_clock(tmp_path, capsys):
    for seed in (1, 2, 3):
        write_run(tmp_path / "runs", seed, [float(i) for i in range(10)])
    whole, first = tmp_path / "whole", tmp_path / "first"
    draw(tmp_path / "runs", out=whole, window=2)
    table = draw(tmp_path / "runs", out=first, window=2, max_steps=1_300, wall_clock=False)
    # Four log points, the last one of 3.0; the runs' own final returns are of later steps.
    assert cells(table, "ppo:eager")[3:6] == ["1,200", "3.0 ± 0.0", "3.0 [3.0, 3.0]"]
    assert len(first.with_suffix(".csv").read_text().splitlines()) == 1 + 3 * 4
    (height, width, _), (whole_height, *_) = (imageio.imread(p.with_suffix(".png")).shape for p in (first, whole))
    assert height < 0.7 * whole_height and height < width
    with pytest.raises(UsageError, match="--max-steps 299: is before the first log point"):
        draw(tmp_path / "runs", out=first, max_steps=299)
    assert "left out" not in capsys.readouterr().err
    late = write_run(tmp_path / "runs", 4, [float(i) for i in range(10)])
    points = (late / "metrics.jsonl").read_text().splitlines(keepends=True)
    (late / "metrics.jsonl").write_text("".join(points[8:]))
    assert draw(tmp_path / "runs", out=first, window=2, max_steps=1_300, wall_clock=False) == table
    assert "1 of 4 runs left out: no log point before --max-steps" in capsys.readouterr().err


def test_some_environments_alone(tmp_path):
    for env_id in ("Hopper-v5", "Walker2d-v5"):
        write_run(tmp_path / "runs", 1, [1.0] * 4, env_id=env_id)
    table = draw(tmp_path / "runs", out=tmp_path / "p", env_ids=("Walker2d-v5",))
    assert "Walker2d-v5" in table and "Hopper-v5" not in table
    with pytest.raises(UsageError, match="--env-ids Ant-v5: no run has it; there are Hopper-v5, Walker2d-v5"):
        draw(tmp_path / "runs", out=tmp_path / "p", env_ids=("Ant-v5",))


def test_other_metrics(tmp_path):
    for seed in (1, 2, 3):
        write_run(tmp_path, seed, [0.0] * 4)
    table = draw(tmp_path, out=tmp_path / "p", metric="losses/value_loss", window=2)
    # Written with every log point, the last two of which say 1/4.
    assert cells(table, "ppo:eager")[5] == "0.2500 [0.2500, 0.2500]"


def test_labels_rename_and_join_groups(tmp_path):
    for seed in (1, 2):
        write_run(tmp_path, seed, [1.0])
        write_run(tmp_path, seed + 2, [1.0], compile=True)
    table = draw(tmp_path, out=tmp_path / "p", labels=("ppo:eager=ours", "ppo:compile=ours"))
    assert cells(table, "ours")[2] == "4"
    with pytest.raises(UsageError, match=r"--labels sac:eager=x: .* ppo:compile, ppo:eager"):
        draw(tmp_path, out=tmp_path / "p", labels=("sac:eager=x",))


def test_weak_groups_are_told(tmp_path, capsys):
    write_run(tmp_path / "a", 1, [1.0], num_envs=1)
    write_run(tmp_path / "b", 1, [1.0], num_envs=8)
    draw(tmp_path, out=tmp_path / "p")
    told = capsys.readouterr().err
    assert len(told.splitlines()) == 3
    for words in ("only 2 of at least 3 seeds", "more than once", "differ in num_envs"):
        assert words in told


@pytest.mark.parametrize(
    ("content", "message"),
    [("run,script\n1,2\n", "has no column 'mode'"), ("\x00", "has no rows"), (None, "cannot be read")],
)
def test_bad_csv(tmp_path, capsys, content, message):
    path = tmp_path / "curves.csv"
    if content is not None:
        path.write_text(content)
    with pytest.raises(UsageError, match=f"nothing to draw: .*{message}"):
        draw(csv=(path,), out=tmp_path / "p")
    # Beside something that can be drawn it is only told.
    draw(write_run(tmp_path, 1, [1.0]), csv=(path,), out=tmp_path / "p")
    assert message in capsys.readouterr().err


def test_without_rliable_the_remedy_is_told(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "rliable", None)
    with pytest.raises(UsageError, match=r"rliable .*pip install -r requirements/requirements-dev\.txt"):
        draw(write_run(tmp_path, 1, [1.0]), out=tmp_path / "p")


def test_unwritable_out(tmp_path):
    run_dir = write_run(tmp_path, 1, [1.0])
    with pytest.raises(UsageError, match=r"--out .*cannot be written"):
        draw(run_dir, out=run_dir / "args.json" / "p")


def test_an_empty_folder_exits_2_with_one_line(tmp_path):
    (tmp_path / "runs").mkdir()
    command = [
        sys.executable,
        "-m",
        "leanrl.tools.plot",
        str(tmp_path / "runs"),
        "--out",
        str(tmp_path / "plots" / "p"),
    ]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 2
    assert result.stdout == ""
    assert result.stderr == f"plot: nothing to draw: {tmp_path}/runs: no run directory there\n"
    assert not (tmp_path / "plots").exists()
