"""Uploads to the Hugging Face Hub: what its library is asked for, which sends nothing here."""

import os
import signal
from unittest.mock import create_autospec

import pytest
from sebulba_runs import run_alone, tiny

from leanrl.support.run import Run

huggingface_hub = pytest.importorskip("huggingface_hub", reason="requirements/requirements-hub.txt is not installed")


@pytest.fixture
def api(monkeypatch):
    """Somebody is logged in; of the library's calls only the arguments are checked."""
    api = create_autospec(huggingface_hub.HfApi, instance=True)
    api.create_repo.side_effect = lambda name, **_: huggingface_hub.RepoUrl(f"https://huggingface.co/{name}")
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: api)
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: "hf_token")
    return api


def upload(monkeypatch, tmp_path, *flags) -> int:
    flags = tiny(tmp_path, "--total-timesteps=512", "--upload-model", *flags)
    return run_alone(monkeypatch, "cleanba_ppo", *flags)


def test_a_model_is_uploaded(monkeypatch, capsys, tmp_path, api):
    assert upload(monkeypatch, tmp_path, "--hf-entity=us") == 0
    asked = api.upload_folder.call_args.kwargs
    repo = asked["repo_id"]
    assert repo == "us/CartPole-v1-cleanba_ppo-seed1" and repo in capsys.readouterr().out.splitlines()[-1]
    assert set(asked["allow_patterns"]) == {"model.pt", "args.json", "summary.json", "metrics.jsonl"}
    assert all((asked["folder_path"] / name).exists() for name in asked["allow_patterns"])


def test_a_refused_upload_keeps_the_model(monkeypatch, capsys, tmp_path, api):
    api.create_repo.side_effect = ValueError("Invalid username or password.")
    assert upload(monkeypatch, tmp_path) == 1
    assert "RuntimeError: --upload-model: Invalid username" in capsys.readouterr().err.splitlines()[-1]
    assert (tmp_path / "run" / "model.pt").exists()


def test_an_interrupted_run_is_not_uploaded(monkeypatch, tmp_path, api):
    log = Run.log
    monkeypatch.setattr(Run, "log", lambda *point: (os.kill(os.getpid(), signal.SIGTERM), log(*point)))
    assert upload(monkeypatch, tmp_path, "--total-timesteps=1000000", "--log-frequency=1") == 0
    assert (tmp_path / "run" / "model.pt").exists() and not api.create_repo.called


def test_nobody_logged_in_is_told_at_once(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: None)
    assert upload(monkeypatch, tmp_path) == 2
    err = capsys.readouterr().err
    assert "--upload-model: nobody is logged in" in err and err.count("\n") == 1 and not (tmp_path / "run").exists()
