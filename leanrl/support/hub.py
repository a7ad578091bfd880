"""Uploading a trained model to the Hugging Face Hub (``--upload-model``)."""

import json
from pathlib import Path

from leanrl.support.errors import UsageError, pip_command

UPLOADED = ("model.pt", "args.json", "summary.json", "metrics.jsonl")


def require_hub() -> None:
    """UsageError unless the package is there and somebody is logged in; before hours of training."""
    try:
        import huggingface_hub
    except ImportError:
        raise UsageError(f"--upload-model: the package huggingface_hub is missing; {pip_command('hub')}") from None
    if huggingface_hub.get_token() is None:
        raise UsageError(
            "--upload-model: nobody is logged in to the Hugging Face Hub; run `hf auth login` or set HF_TOKEN"
        )


def model_card(summary: dict) -> str:
    """README.md of the repository on the Hub: what it is, what it reached, how to play it."""
    env_id, script = summary["env_id"], summary["script"]
    reached = summary["episodic_return"]
    reached = "no episode ended" if reached is None else f"mean return of the last 100 training episodes: {reached:.1f}"
    head = f"---\nlibrary_name: leanrl\ntags: [deep-reinforcement-learning, {script}, {env_id}]\n---\n"
    text = (
        f"# {script} on {env_id}\n\nSeed {summary['seed']}, {summary['global_step']:,} environment steps; {reached}.\n"
    )
    return f"{head}{text}\n    python -m leanrl.tools.evaluate FOLDER_OF_THIS_REPOSITORY\n"


def upload_run(run_dir: Path, entity: str) -> str:
    """Uploads what is needed to play and to judge a run's model; returns the repository's address.

    Args:
        run_dir: a run that has ended, with ``model.pt``.
        entity: user or organisation; empty for whoever is logged in.

    Raises:
        RuntimeError: the Hub refused, or cannot be reached; the model remains in the run directory.
    """
    from huggingface_hub import CommitOperationAdd, HfApi

    summary = json.loads((run_dir / "summary.json").read_text())
    name = f"{summary['env_id'].replace('/', '-')}-{summary['script']}-seed{summary['seed']}"
    files = [CommitOperationAdd(file, str(run_dir / file)) for file in UPLOADED]
    files.append(CommitOperationAdd("README.md", model_card(summary).encode()))
    try:
        api = HfApi()
        repo = api.create_repo(f"{entity}/{name}" if entity else name, exist_ok=True)
        api.create_commit(repo.repo_id, files, commit_message=f"Upload {run_dir.name}")
    except Exception as error:  # the library's and its HTTP client's have no common class
        reason = " ".join(str(error).split())[:300]
        raise RuntimeError(f"--upload-model: {reason}; the model is in {run_dir}/model.pt") from None
    return str(repo)
