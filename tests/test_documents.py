"""Every command in the documents and docstrings names what there is, with flags that it takes."""

import importlib
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch
import tyro
from packaging.requirements import Requirement
from scripts import ONE_GRAPH_SCRIPTS

from leanrl.tools import compare, trials
from leanrl.tools.peers import PEERS
from leanrl.tools.trials import REPOSITORY, SCRIPTS

TOOLS = sorted(path.stem for path in (SCRIPTS / "tools").glob("*.py") if "run_tool(main, Args)" in path.read_text())
DOCUMENTS = [REPOSITORY / "README.md", *sorted((REPOSITORY / "doc").rglob("*.md"))]
DOCUMENTS += [*sorted(SCRIPTS.glob("[!_]*.py")), *sorted((SCRIPTS / "tools").glob("[!_]*.py"))]
VENV = r"(?:\.venv/bin/)?"
COMMAND = rf"(?:\./run\.sh|{VENV}(?:torchrun|python leanrl/|python -m leanrl))"
LINES = ("PPO", "SAC", "TD3", "DQN", "PPO-Atari")
# What may stand for a page's capitals.
WORDS = dict(SCRIPT="dqn_torchcompile", ENV="Acrobot-v1", SEED="1", AMP="bf16", LAG="0", LAYOUT="", FLAGS="")


def commands_in(path: Path) -> list[str]:
    """The command lines of a document: those that stand alone on lines, and those within the text."""
    text = re.sub(r"\\+\n\s*", " ", path.read_text())
    lines = re.findall(rf"^(?:    )?((?:\w+=\S+ )*{COMMAND}[^\n]*)$", text, re.MULTILINE)
    within = [" ".join(words.split()) for words in re.findall(rf"`({COMMAND}[^`]*)`", text)]
    return [*lines, *within]


def split(command: str) -> list[str]:
    """The words of a command line, optional ones too, as a call of run.sh without variables before it and comments."""
    command = re.sub(rf"{VENV}(?:torchrun .*?leanrl/|python leanrl/|python -m leanrl\.tools\.)", "./run.sh ", command)
    command = re.sub(r"\b[A-Z]+\b", lambda match: WORDS.get(match[0], match[0]), re.sub(r"[][]", "", command))
    command = re.sub(r"\$\(cat (\S+)\)", lambda match: (REPOSITORY / match[1]).read_text(), command)
    words = shlex.split(re.sub(r"\$\(mktemp -d\)", "folder", command), comments=True)
    while "=" in words[0]:
        words.pop(0)
    return words[: words.index("&")] if "&" in words else words


def check_script(name: str, flags: list[str]) -> None:
    module = importlib.import_module(f"leanrl.{name}")
    if "--help" not in flags:
        module.validate(tyro.cli(module.Args, args=flags))


def check_tool(name: str, flags: list[str]) -> None:
    assert name in TOOLS, f"there is no tool {name}"
    if "--help" in flags:
        return
    args = tyro.cli(importlib.import_module(f"leanrl.tools.{name}").Args, args=flags)
    # Of the scripts that the tool runs; the tool sets what else they need.
    scripts = next((getattr(args, field) for field in ("contenders", "scripts", "script") if hasattr(args, field)), ())
    for entry in [scripts] if isinstance(scripts, str) else scripts:
        who, *own = entry.split()
        script = PEERS[who].script if who in PEERS else who.split(":")[0]
        tyro.cli(importlib.import_module(f"leanrl.{script}").Args, args=[*getattr(args, "script_args", ()), *own])
    if command := getattr(args, "command", ()):
        check_script(Path(command[0]).stem, [*command[1:]])


def check(command: str) -> None:
    name, *flags = split(command)[1:] or ["--help"]
    script = name.removesuffix(".py")
    if name == "peers":
        check_script(PEERS[flags[0]].script, flags[1:])
    elif name == "bench":
        assert set(flags[:1]) <= set(LINES)
        check_tool("compare", flags[1:])
    elif (SCRIPTS / f"{script}.py").exists():
        check_script(script, flags)
    elif name not in ("test", "--help"):
        check_tool(name, flags)


CASES = [(path, command) for path in DOCUMENTS for command in dict.fromkeys(commands_in(path))]


@pytest.mark.parametrize("path, command", CASES, ids=lambda x: x.name if isinstance(x, Path) else x[:60])
def test_a_command_parses(path, command, capsys):
    try:
        check(command)
    except SystemExit:
        pytest.fail(f"{path.name}: {command}\n{capsys.readouterr().err}")


SHORT = [case for case in CASES if re.search(r"plot --csv doc/|--dry-run", case[1])]


@pytest.mark.parametrize("path, command", SHORT, ids=lambda x: x.name if isinstance(x, Path) else x[:60])
def test_a_short_command_runs(path, command, tmp_path):
    """As it stands on the page, but that plots go elsewhere."""
    python = shlex.quote(sys.executable)
    command = re.sub(r"\./run\.sh |python -m leanrl\.tools\.", f"{python} -m leanrl.tools.", command)
    command = command.replace(" --csv ", f" --out {shlex.quote(str(tmp_path))}/plot --csv ")
    assert subprocess.check_output(["bash", "-c", command], cwd=REPOSITORY, timeout=300)


def test_there_are_commands_everywhere():
    """Or this file would hold nothing."""
    assert len(CASES) > 100 and {path.name for path, _ in CASES} >= {"README.md", "distributed.md", "dqn.py", "plot.py"}


def test_run_sh_lists_every_tool():
    usage = (REPOSITORY / "run.sh").read_text().split("EOF")[1]
    assert set(TOOLS) <= set(re.findall(r"\w+", usage))


def pins(path: Path) -> list[Requirement]:
    """Of a requirements file and those that it includes."""
    lines = [line for line in path.read_text().splitlines() if line[:1] not in ("", "#") and line != "-e ."]
    included = [pin for line in lines if line.startswith("-r ") for pin in pins(path.parent / line[3:])]
    return included + [Requirement(line) for line in lines if not line.startswith("-r ")]


def test_pyproject_and_requirements_agree():
    """The same names in the same groups, and each pin is a version that pyproject allows."""
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    groups = {"requirements": project["dependencies"]}
    groups |= {f"requirements-{name}": group for name, group in project["optional-dependencies"].items()}
    files = {path.stem for path in (REPOSITORY / "requirements").glob("*.txt")}
    assert set(groups) == files - {"requirements-rl_games"}  # no extra has --no-deps
    for stem, group in groups.items():
        allowed = {requirement.name: requirement.specifier for requirement in map(Requirement, group)}
        pinned = {pin.name: str(pin.specifier) for pin in pins(REPOSITORY / "requirements" / f"{stem}.txt")}
        assert pinned.keys() == allowed.keys()
        assert all(pin.startswith("==") and pin[2:] in allowed[name] for name, pin in pinned.items())


@pytest.mark.parametrize("bf16_units", [True, False], ids=["bf16", "no bf16"])
@pytest.mark.parametrize("line", LINES)
def test_bench_is_a_call_of_compare(line, bf16_units, tmp_path, monkeypatch):
    """Which takes what run.sh gives it, up to the first run; flags that are added win."""
    python = tmp_path / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(
        '#!/bin/sh\n[ "$2" != leanrl.tools.compare ] || printf "%s\\n" START "$@"\n'
        f"case $2 in *has_bf16_units*) exit {int(not bf16_units)} ;; esac\n"
    )
    python.chmod(0o755)
    (tmp_path / "run.sh").write_text((REPOSITORY / "run.sh").read_text())
    (tmp_path / "requirements").symlink_to(REPOSITORY / "requirements")
    call = ["bash", tmp_path / "run.sh", "bench", line, "--seeds", "7", f"--out={tmp_path}/out", "--", "--gamma", "0.9"]
    out = subprocess.run(call, capture_output=True, text=True, check=True).stdout
    words = out.split("START\n")[1].splitlines()
    args = tyro.cli(compare.Args, args=words[2:])
    assert args.seeds == (7,) and f"sb3:{line}" in args.contenders and args.max_seconds is None
    assert args.script_args[-2:] == ("--gamma", "0.9")
    in_bf16 = [contender for contender in args.contenders if contender.endswith("--amp bf16")]
    assert len(in_bf16) == (bf16_units and line in ("SAC", "TD3", "PPO-Atari"))
    monkeypatch.setattr(trials, "require_peer", lambda who, name: None)
    monkeypatch.setattr(trials, "resolve_device", lambda args: torch.device("cpu"))
    monkeypatch.setattr(trials, "run_trials", lambda *_: sys.exit("the first run"))
    with pytest.raises(SystemExit, match="the first run"):
        compare.main(args)


@pytest.mark.parametrize("now", ONE_GRAPH_SCRIPTS)
def test_run_sh_says_what_is_called_now(now):
    old = now.replace("torchcompile", "onegraph")
    call = subprocess.run([REPOSITORY / "run.sh", old, "--compile"], capture_output=True, text=True, timeout=300)
    assert (call.returncode, call.stdout) == (2, "")
    assert call.stderr == f"run.sh: {old} is a mode now: ./run.sh {now} --compile --one-graph\n"


@pytest.mark.parametrize("path", [path for path in DOCUMENTS if path.suffix == ".md"], ids=lambda path: path.name)
def test_links_lead_somewhere(path):
    links = re.findall(r"\]\((?!https?:)([^)#]+)[^)]*\)", path.read_text())
    assert not [link for link in links if not (path.parent / link).exists()]
    named = re.findall(r"\b(?:doc|leanrl|tests|requirements)/[\w/]+\.(?:md|py|txt|slurm)\b", path.read_text())
    assert not [name for name in named if not (REPOSITORY / name).exists() and not (path.parent / name).exists()]


@pytest.mark.parametrize("path", sorted(SCRIPTS.rglob("*.py")), ids=lambda path: path.name)
def test_documents_that_code_names_are_there(path):
    named = re.findall(r"\b(?:doc|leanrl|tests|requirements)/[\w/.-]+\.(?:md|py|txt)\b", path.read_text())
    assert not [name for name in named if not (REPOSITORY / name).exists()]
