"""Playing a saved model: whole episodes, deterministic actions, optionally a video."""

import importlib
from pathlib import Path

import numpy as np
import torch

from leanrl.support.cli import read_args_json
from leanrl.support.envs import SerialVectorEnv, env_seeds, make_env, use_headless_rendering
from leanrl.support.errors import UsageError

# Far from every training environment's index, so that evaluation never replays a training seed.
EVALUATION_INDEX = 1_000_000


def load_model(run_dir: Path) -> dict:
    """The contents of ``model.pt``: script, args, model.

    Raises:
        UsageError: not a run directory, trained without ``--save-model``, or a damaged file.
    """
    path = Path(run_dir) / "model.pt"
    read_args_json(Path(run_dir))
    if not path.exists():
        raise UsageError(f"{run_dir}: has no model.pt; train with --save-model")
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
        return {key: content[key] for key in ("script", "args", "model")}
    except Exception as error:  # torch.load raises nearly anything on damaged input
        raise UsageError(f"{path}: damaged or not a saved model ({type(error).__name__})") from None


def play(run_dir: Path, episodes: int, seed: int = 0, video: Path | None = None, progress=iter) -> list[float]:
    """Plays ``episodes`` whole episodes with the saved policy.

    Args:
        run_dir: a run directory with ``model.pt``.
        episodes: how many.
        seed: of the evaluation environments.
        video: where to write the first episode as mp4; None for no video.
        progress: wraps the range of episodes, e.g. tqdm.

    Returns:
        the undiscounted return of each episode.

    Raises:
        UsageError: no usable model, or nothing here that can render.
    """
    saved = load_model(run_dir)
    env_id = saved["args"]["env_id"]
    if video is not None:
        use_headless_rendering()
    script = importlib.import_module(f"leanrl.{saved['script']}")
    env = make_env(env_id, **({"render_mode": "rgb_array"} if video is not None else {}))
    envs = SerialVectorEnv([env], env_seeds(seed, 1, EVALUATION_INDEX))
    policy = script.load_policy(saved["model"], envs)
    returns, frames = [], []
    obs, _ = envs.reset()
    for episode in progress(range(episodes)):
        total, done = 0.0, False
        while not done:
            if video is not None and episode == 0:
                frames.append(_render(env))
            obs, reward, terminated, truncated, _ = envs.step(policy(obs))
            total += float(reward[0])
            done = bool(terminated[0] or truncated[0])
        returns.append(total)
        # The step that only resets.
        obs, *_ = envs.step(np.zeros_like(envs.action_space.sample()))
    if video is not None:
        _write_mp4(frames, video, env.metadata.get("render_fps", 30))
    envs.close()
    return returns


def record_video(run_dir: Path) -> Path:
    """Plays one episode of the saved model into ``RUN_DIR/videos/episode.mp4`` and returns its path."""
    path = Path(run_dir) / "videos" / "episode.mp4"
    play(run_dir, episodes=1, video=path)
    print(f"video: {path}")
    return path


def _render(env) -> np.ndarray:
    try:
        return env.render()
    except Exception as error:
        remedy = "a video needs OpenGL: install libegl1 (Debian) and set MUJOCO_GL=egl"
        raise UsageError(f"--capture-video: cannot render here ({error}); {remedy}") from None


def _write_mp4(frames: list[np.ndarray], path: Path, fps: float) -> None:
    import imageio.v2 as imageio

    path.parent.mkdir(parents=True, exist_ok=True)
    imageio.mimwrite(path, frames, fps=fps, macro_block_size=1, quality=8)
