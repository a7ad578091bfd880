"""Playing a saved model: whole episodes, optionally a video."""

import importlib
import io
import itertools
import math
import os
from contextlib import closing, contextmanager, nullcontext, redirect_stderr
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import gymnasium as gym
import numpy as np
import torch
from gymnasium.vector import VectorEnv
from tqdm import tqdm

from leanrl.support.atari import PROTOCOLS, AtariProtocol, atari_games, make_atari_envs
from leanrl.support.cli import read_args_json
from leanrl.support.envs import EnvBackend, make_envs, require_envpool_env
from leanrl.support.errors import UsageError

# Games are deterministic: without these, a policy could repeat the same moves forever.
RANDOM_ATARI_ACTIONS = 0.01

# Far from every training environment's index, so that evaluation never repeats a training seed.
EVALUATION_INDEX = 1_000_000

# Some environments take 125 steps per simulated second, and rendering a MuJoCo frame takes 0.1 s without a GPU.
MAX_VIDEO_FPS = 30


def load_model(run_dir: Path, file: str = "model.pt") -> dict:
    """A run's model, from ``model.pt`` or a snapshot: what the script's ``load_policy`` needs.

    Raises:
        UsageError: trained without ``--save-model``, or a damaged file.
    """
    path = run_dir / file
    if not path.exists():
        raise UsageError(f"{run_dir}: has no {file}; train with --save-model")
    try:
        return torch.load(path, map_location="cpu", weights_only=True)["model"]
    except Exception as error:  # torch.load raises almost anything on damaged input
        raise UsageError(f"{path}: damaged or not a saved model ({type(error).__name__})") from None


def training_script(run_dir: Path, name: str) -> ModuleType:
    """The training script ``name``; UsageError, about the run that names it, if it is not one of ours."""
    # The name comes from a file: it may choose one of our scripts, but not make Python import anything else.
    if name not in {path.stem for path in Path(__file__).parents[1].glob("[!_]*.py")}:
        raise UsageError(f"{run_dir}: was made by {name}, which is not a script of this version")
    return importlib.import_module(f"leanrl.{name}")


def play(
    run_dir: Path, episodes: int, seed=0, video: Path | None = None, sticky=False, file="model.pt", script=None
) -> list[float]:
    """Plays a whole episode in each of ``episodes`` environments; the same arguments give the same returns.

    Actions are deterministic (the policy's best or mean action), except that in Atari games 1 in 100 is random.

    Args:
        run_dir: a run directory with ``model.pt``.
        episodes: how many.
        seed: of the evaluation environments.
        video: where to write the first episode as mp4, at the environment's own speed; None for no video.
        sticky: use sticky actions, with the usual probability of 0.25 (Atari games only).
        file: the model's file name in ``run_dir``.
        script: the training script's module; by default the script that args.json names.

    Returns:
        the undiscounted return of each episode; for Atari games the score of a whole game, over all lives.

    Raises:
        UsageError: no usable model, an unknown script, sticky actions outside Atari, or no way to render here.
    """
    run, model = read_args_json(run_dir), load_model(run_dir, file)
    script = script or training_script(run_dir, str(run["script"]))
    protocol = atari_protocol(script, run["args"])
    if sticky and protocol is None:
        raise UsageError(f"--sticky: {run['args']['env_id']} has none; sticky actions are for Atari games")
    # Raw rewards, but lives as in training: under episodic_life EnvPool presses fire to serve the next ball, and an
    # agent that never had to do so itself would let time run out.
    protocol = protocol and protocol._replace(reward_clip=False, repeat_action_probability=0.25 if sticky else 0.0)
    with closing(make_evaluation_envs(run["args"], episodes, seed, video is not None, protocol)) as envs:
        try:
            policy = script.load_policy(model, envs)
        except Exception as error:  # missing tensors, other shapes: anything a foreign file leads to
            reason = str(error).strip().splitlines() or [type(error).__name__]
            raise UsageError(f"{run_dir / file}: does not fit {run['script']} ({reason[0]})") from None
        rng = np.random.default_rng(seed)
        returns, playing = np.zeros(episodes), np.ones(episodes, bool)
        # disable=None: shown only on a terminal.
        bar = tqdm(total=episodes, desc=run_dir.resolve().name, unit="episode", leave=False, disable=None)
        with bar, film(envs, video) if video else nullcontext(lambda step, done: None) as show:
            obs, _ = envs.reset()
            show(0, False)
            for step in itertools.count(1):
                actions = policy(obs)
                if protocol:
                    explores = rng.random(episodes) < RANDOM_ATARI_ACTIONS
                    actions = np.where(explores, rng.integers(envs.single_action_space.n, size=episodes), actions)
                obs, rewards, terminated, truncated, infos = envs.step(actions)
                returns += rewards * playing
                ended = playing & infos.get("game_over", terminated | truncated)
                if playing[0]:
                    show(step, ended[0])
                bar.update(ended.sum())
                playing &= ~ended
                if not playing.any():
                    return returns.tolist()


def atari_protocol(script: ModuleType, args: dict) -> AtariProtocol | None:
    """The protocol of a run's Atari game: its --protocol, or its script's PROTOCOL; None if it played no Atari game."""
    if "protocol" in args:
        in_envpool = args.get("env_backend", "envpool") == "envpool" and args["env_id"] in atari_games()
        return PROTOCOLS[args["protocol"]] if in_envpool else None
    return getattr(script, "PROTOCOL", None)


def make_evaluation_envs(
    args: dict, num_envs: int, seed: int, rendering: bool, protocol: AtariProtocol | None
) -> VectorEnv:
    """Environments like those of a run with ``args``, Atari games by ``protocol``, with seeds of their own."""
    env_id = args["env_id"]
    # The other backend's environment of that name may differ or not exist, and draws other random numbers.
    backend = "envpool" if protocol is not None else args.get("env_backend", "gymnasium")
    options = {"first_index": EVALUATION_INDEX}
    if rendering:
        backend = require_video(env_id, backend)
        options["render_mode"] = "rgb_array"
        if "gymnasium.envs.mujoco" in str(gym.registry.get(env_id)):
            options["camera_name"] = "track"  # Gymnasium 1.4's default stays behind when HalfCheetah runs
    if protocol is not None:
        return make_atari_envs(env_id, num_envs, seed, protocol, **options)
    return make_envs(env_id, num_envs, seed, backend, **options)


# ------------------------------------------------------------------------------------------------------------- VIDEO


def require_video(env_id: str, backend: EnvBackend = "gymnasium") -> EnvBackend:
    """Checks before training, with a test frame, that ``env_id`` can be filmed; returns the backend that films it.

    Raises:
        UsageError: this machine cannot film it; says what would help.
    """
    if not find_spec("imageio_ffmpeg"):  # imageio itself notices only at the first frame
        raise UsageError("--capture-video: needs a package that is missing; pip install imageio imageio-ffmpeg")
    backend = filming_backend(env_id, backend)
    if backend == "gymnasium" and not os.environ.get("DISPLAY"):  # MuJoCo and pygame read these on import
        os.environ["MUJOCO_GL"] = os.environ.get("MUJOCO_GL") or "egl"
        os.environ["SDL_VIDEODRIVER"] = os.environ.get("SDL_VIDEODRIVER") or "dummy"
    # Without OpenGL, Gymnasium's half-built viewer fails again when garbage-collected, with a traceback on stderr.
    with redirect_stderr(io.StringIO()):
        try:
            with closing(make_envs(env_id, 1, 0, backend, num_threads=1, render_mode="rgb_array")) as envs:
                envs.reset()
                if np.ndim(envs.render()) != 3:
                    raise UsageError(f"--capture-video: {env_id} does not render to images")
        except UsageError:
            raise
        except Exception as error:  # OpenGL fails in many ways, with no common class
            reason = " ".join(str(error).split()) or type(error).__name__
            if backend == "gymnasium" and not isinstance(error, gym.error.DependencyNotInstalled):  # names its remedy
                reason += "; MuJoCo needs OpenGL: install libegl1 (Debian: apt install libegl1) and set MUJOCO_GL=egl"
            raise UsageError(f"--capture-video: cannot film {env_id} here: {reason}") from None
    return backend


def filming_backend(env_id: str, backend: EnvBackend) -> EnvBackend:
    """The backend that films ``env_id``: ``backend`` itself, except that Gymnasium films EnvPool's MuJoCo tasks.

    Raises:
        UsageError: EnvPool has no such environment, or Gymnasium lacks this MuJoCo task.
    """
    if backend == "gymnasium" or not require_envpool_env(env_id).startswith("envpool.mujoco"):
        return backend
    # EnvPool 1.2 ships its own OpenGL, and aborts the process if its MuJoCo finds the system's first.
    if env_id not in gym.registry:
        raise UsageError(f"--capture-video: cannot film {env_id}: Gymnasium draws MuJoCo, and has no such environment")
    return "gymnasium"


@contextmanager
def film(env: VectorEnv, path: Path):
    """Films one episode of ``env`` to an mp4; yields ``show(step, done)``, to be called after the reset and each step.

    The video runs at the environment's own speed or, where that is unknown (EnvPool except Atari), at MAX_VIDEO_FPS
    steps per second. If the speed exceeds MAX_VIDEO_FPS, only every n-th frame is kept, and the last.
    """
    import imageio.v2 as imageio

    fps = env.metadata.get("render_fps") or MAX_VIDEO_FPS
    every = math.ceil(fps / MAX_VIDEO_FPS)
    path.parent.mkdir(parents=True, exist_ok=True)
    # Frames of odd size are stretched by a pixel, since H.264 halves the resolution of colour.
    with imageio.get_writer(path, fps=fps / every, macro_block_size=2, quality=8) as writer:
        # One at a time: the frames of 1,000 steps would take 700 MB.
        yield lambda step, done: writer.append_data(env.render()) if done or step % every == 0 else None
