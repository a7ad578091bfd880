"""Uploading a trained model to the Hugging Face Hub (``--upload-model``)."""

from pathlib import Path

from leanrl.support.cli import read_args_json
from leanrl.support.errors import UsageError, pip_command

# What it takes to play and judge a run's model.
UPLOADED = ["model.pt", "args.json", "summary.json", "metrics.jsonl"]


def require_hub() -> None:
    """UsageError unless the package is installed and a user is logged in: checked before hours of training."""
    try:
        import huggingface_hub
    except ImportError:
        raise UsageError(f"--upload-model: the package huggingface_hub is missing; {pip_command('hub')}") from None
    if huggingface_hub.get_token() is None:
        raise UsageError("--upload-model: nobody is logged in to the Hugging Face Hub; run `hf auth login`")


def upload_run(run_dir: Path, entity: str) -> str:
    """Uploads a finished run's model and records; returns the repository's URL.

    Args:
        run_dir: the run's directory; ``evaluate`` also plays a copy of the repository.
        entity: user or organisation; empty for whoever is logged in.

    Raises:
        RuntimeError: the Hub refused or cannot be reached; the model is still in the run directory.
    """
    from huggingface_hub import HfApi

    run = read_args_json(run_dir)
    name = f"{run['args']['env_id'].replace('/', '-').replace(':', '-')}-{run['script']}-seed{run['args']['seed']}"
    try:
        api = HfApi()
        repo = api.create_repo(f"{entity}/{name}" if entity else name, exist_ok=True)
        api.upload_folder(repo_id=repo.repo_id, folder_path=run_dir, allow_patterns=UPLOADED)
    except Exception as error:  # the library and its HTTP client share no error class
        reason = " ".join(str(error).split())[:300]
        raise RuntimeError(f"--upload-model: {reason}; the model is in {run_dir}/model.pt") from None
    return str(repo)
