"""The two files of a pair are one program: what both define has the same words, and both make the same run."""

import importlib
import inspect

import pytest
from scripts import OFF_POLICY_REFERENCES, REFERENCES, course, run_tiny

# Of the reference alone: Gymnasium's wrappers, and acting.
OWN = {"wrap_envs", "rms_state", "load_rms_state", "policy_step", "act"}


def definitions(script: str) -> dict[str, str]:
    """The words of each function and class of a script, by name."""
    module = importlib.import_module(f"leanrl.{script}")
    defined = {name: x for name, x in vars(module).items() if inspect.isfunction(x) or inspect.isclass(x)}
    return {name: inspect.getsource(x) for name, x in defined.items() if x.__module__ == module.__name__}


@pytest.mark.parametrize("script", REFERENCES)
def test_a_pair_is_one_program(script):
    """All but the optimiser's class."""
    reference, fast = definitions(script), definitions(f"{script}_torchcompile")
    assert reference.keys() - OWN <= fast.keys()
    own = {"Args", "main"} | ({"validate"} if script == "ppo_atari_envpool" else set())  # which may have groups
    shared = [name for name in reference if name in fast]
    assert shared == [name for name in fast if name in reference], "another order"
    for name in {*shared} - own:
        assert fast[name] == reference[name].replace("torch.optim.Adam", "Adam"), name
    modules = [importlib.import_module(f"leanrl.{name}") for name in (script, f"{script}_torchcompile")]
    constants = [{name: x for name, x in vars(module).items() if name.isupper()} for module in modules]
    common = constants[0].keys() & constants[1].keys()
    assert [constants[0][name] for name in common] == [constants[1][name] for name in common]
    assert all(list(inspect.signature(module.main).parameters) == ["args"] for module in modules)


@pytest.mark.parametrize("script", [*OFF_POLICY_REFERENCES, "pqn", "pqn_atari_envpool"])
@pytest.mark.parametrize("mode", [[], pytest.param(["--compile"], marks=pytest.mark.long)], ids=["eager", "compile"])
def test_both_make_the_same_run(script, mode, tmp_path):
    """Apart from rounding, which decides none of PQN's actions here: all are random, and the same."""
    flags = ["--num-envs=4", f"--total-timesteps={2560 if script == 'pqn' else 512}"]
    flags += ["--start-e=1", "--end-e=1"] * ("pqn" in script)
    theirs = course(run_tiny(script, tmp_path, *flags, name="plain"))
    ours = course(run_tiny(f"{script}_torchcompile", tmp_path, *flags, *mode, name="quick"))
    assert len(ours) >= 4 and [row.keys() for row in ours] == [row.keys() for row in theirs]
    for our_row, their_row in zip(ours, theirs, strict=True):
        assert our_row == pytest.approx(their_row, rel=1e-3)
