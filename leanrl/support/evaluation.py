"""Playing a saved model: whole episodes, optionally a video."""

import importlib
import io
import math
import os
from collections.abc import Callable
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

# Far from every training environment's index, so that evaluation never replays a training seed.
EVALUATION_INDEX = 1_000_000

# Some environments take 125 steps a second of their time, and without a GPU a frame of MuJoCo's takes 0.1 s to render.
MAX_VIDEO_FPS = 30


def load_model(run_dir: Path, file: str = "model.pt") -> dict:
    """The script (by today's name) and args of a run, and the model in its ``model.pt`` or in a snapshot.

    Raises:
        UsageError: not a run directory, trained without ``--save-model``, or a damaged file.
    """
    run = read_args_json(run_dir)
    path = run_dir / file
    if not path.exists():
        raise UsageError(f"{run_dir}: has no {file}; train with --save-model")
    try:
        model = torch.load(path, map_location="cpu", weights_only=True)["model"]
        if "hidden" in (network := model.get("network", {})):  # earlier versions' name for the layer behind the torso
            network["hiddens"] = [network.pop("hidden")]
    except Exception as error:  # torch.load raises nearly anything on damaged input
        raise UsageError(f"{path}: damaged or not a saved model ({type(error).__name__})") from None
    # Earlier versions had scripts that are a mode now, --one-graph.
    return {"script": str(run["script"]).replace("_onegraph", "_torchcompile"), "args": run["args"], "model": model}


def training_script(run_dir: Path, saved: dict) -> ModuleType:
    """The training script that a saved model names; UsageError if it is not one of this project's."""
    # The name comes from a file: it chooses among our scripts, it does not choose what Python imports.
    scripts = {path.stem for path in Path(__file__).parents[1].glob("*.py")} - {"__init__"}
    name = saved["script"]
    if name not in scripts:
        raise UsageError(f"{run_dir}/model.pt: was made by {name}, which is not a script of this version")
    return importlib.import_module(f"leanrl.{name}")


def load_policy(run_dir: Path, saved: dict, envs: VectorEnv) -> Callable[[np.ndarray], np.ndarray]:
    """The policy of a saved model, built by the ``load_policy`` of the training script that it names.

    Raises:
        UsageError: the script is not one of this project's, or cannot make a policy of this model.
    """
    script = training_script(run_dir, saved)
    try:
        return script.load_policy(saved["model"], envs)
    except Exception as error:  # missing tensors, other shapes: whatever the script makes of a foreign file
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise UsageError(f"{run_dir}/model.pt: does not fit {saved['script']} ({reason[0]})") from None


def play(
    run_dir: Path, episodes: int, seed: int = 0, video: Path | None = None, sticky: bool = False, file: str = "model.pt"
) -> list[float]:
    """Plays ``episodes`` whole episodes with the saved policy; the same arguments give the same returns.

    Args:
        run_dir: a run directory with ``model.pt``.
        episodes: how many.
        seed: of the evaluation environment.
        video: where to write the first episode as mp4, in the time of its environment; None for no video.
        sticky: whether the actions stick; for Atari games.
        file: the model's, in ``run_dir``.

    Returns:
        the undiscounted return of each episode; of Atari games the whole score, over all lives.

    Raises:
        UsageError: no usable model, or nothing here that can render.
    """
    saved = load_model(run_dir, file)
    protocol = atari_protocol(training_script(run_dir, saved), saved["args"])
    if sticky and protocol is None:
        raise UsageError(f"--sticky: {saved['args']['env_id']} has none; sticky actions are for Atari games")
    protocol = protocol and protocol.for_evaluation(sticky)
    envs = make_evaluation_envs(saved["args"], seed, video is not None, protocol)
    returns = []
    with closing(envs):
        policy = load_policy(run_dir, saved, envs)
        obs, _ = envs.reset()
        # disable=None: only on a terminal.
        for episode in tqdm(range(episodes), run_dir.resolve().name, unit="episode", leave=False, disable=None):
            if episode > 0:
                # NEXT_STEP autoreset: the step after a done ignores its action and resets.
                obs, *_ = envs.step(np.zeros(envs.action_space.shape, envs.action_space.dtype))
            episodic_return, step, done = 0.0, 0, False
            with film(envs, video) if video and episode == 0 else nullcontext(lambda step, done: None) as show:
                show(step, done)
                while not done:
                    obs, reward, terminated, truncated, infos = envs.step(policy(obs))
                    episodic_return += float(reward[0])
                    step, done = step + 1, bool(infos.get("game_over", terminated | truncated)[0])
                    show(step, done)
            returns.append(episodic_return)
    return returns


def atari_protocol(script: ModuleType, args: dict) -> AtariProtocol | None:
    """How a run played its Atari game: by its --protocol, or its script's PROTOCOL; None where it played none."""
    if "protocol" in args:
        in_envpool = backend_of(args) == "envpool" and args["env_id"] in atari_games()
        return PROTOCOLS[args["protocol"]] if in_envpool else None
    return getattr(script, "PROTOCOL", None)


def backend_of(args: dict) -> EnvBackend:
    """What stepped the environments of a run with ``args``; the distributed scripts once knew EnvPool alone."""
    return args.get("env_backend", "envpool" if "protocol" in args else "gymnasium")


def make_evaluation_envs(args: dict, seed: int, rendering: bool, protocol: AtariProtocol | None) -> VectorEnv:
    """One environment as a run with ``args`` had them, Atari games by ``protocol``; its seed is none that those had."""
    env_id = args["env_id"]
    # The other backend's environment of that name has other dice, may have other observations, or may not be there.
    backend = "envpool" if protocol is not None else backend_of(args)
    options = {"num_threads": 1, "first_index": EVALUATION_INDEX}
    if rendering:
        backend = require_video(env_id, backend)
        options["render_mode"] = "rgb_array"
    if protocol is not None:
        return make_atari_envs(env_id, 1, seed, protocol, **options)
    return make_envs(env_id, 1, seed, backend, **options)


# ------------------------------------------------------------------------------------------------------------- VIDEO


def require_video(env_id: str, backend: EnvBackend = "gymnasium") -> EnvBackend:
    """The backend that films ``env_id`` of ``backend``, after it has drawn a first frame.

    For ``--capture-video``, before training.

    Raises:
        UsageError: this machine cannot film it; with the remedy.
    """
    if not find_spec("imageio_ffmpeg"):  # imageio would miss it only at the first frame
        raise UsageError("--capture-video: needs a package that is missing; pip install imageio imageio-ffmpeg")
    backend = drawing_backend(env_id, backend)
    in_gymnasium = backend == "gymnasium"
    if in_gymnasium and not os.environ.get("DISPLAY"):  # MuJoCo and pygame read these when they are imported
        os.environ["MUJOCO_GL"] = os.environ.get("MUJOCO_GL") or "egl"
        os.environ["SDL_VIDEODRIVER"] = os.environ.get("SDL_VIDEODRIVER") or "dummy"
    # Where OpenGL fails, Gymnasium's half-made viewer raises once more when it is collected: a traceback on stderr.
    with redirect_stderr(io.StringIO()):
        try:
            with closing(make_envs(env_id, 1, 0, backend, num_threads=1, render_mode="rgb_array")) as envs:
                envs.reset()
                frame = envs.render()
            reason = "" if isinstance(frame, np.ndarray) and frame.ndim == 3 else "it does not render to images"
        except UsageError:
            raise
        except Exception as error:  # OpenGL's many ways to be absent have no common class
            reason = " ".join(str(error).split()) or type(error).__name__
            if in_gymnasium and not isinstance(error, gym.error.DependencyNotInstalled):  # names its remedy
                reason += "; MuJoCo needs OpenGL: install libegl1 (Debian: apt install libegl1) and set MUJOCO_GL=egl"
    if reason:
        raise UsageError(f"--capture-video: cannot film {env_id} here: {reason}")
    return backend


def drawing_backend(env_id: str, backend: EnvBackend) -> EnvBackend:
    """The backend that films ``env_id`` of ``backend``: itself, but Gymnasium for its MuJoCo tasks on EnvPool.

    Raises:
        UsageError: EnvPool has no such environment, or it is a MuJoCo task that Gymnasium has not.
    """
    if backend == "gymnasium" or not require_envpool_env(env_id).startswith("envpool.mujoco"):
        return backend
    # EnvPool 1.2 brings an OpenGL of its own; unless its MuJoCo finds that before the system's, it ends the process.
    if env_id not in gym.registry:
        raise UsageError(f"--capture-video: cannot film {env_id}: Gymnasium draws MuJoCo, and has no such environment")
    return "gymnasium"


@contextmanager
def film(env: VectorEnv, path: Path):
    """Gives a function ``show(step, done)`` that films the state of ``env`` after each step of one episode, to an mp4.

    Plays at the environment's own speed, which EnvPool knows of Atari only (else: a step a frame, MAX_VIDEO_FPS a
    second); of more than MAX_VIDEO_FPS frames a second every n-th is kept, and the last.
    """
    import imageio.v2 as imageio

    fps = env.metadata.get("render_fps") or MAX_VIDEO_FPS
    every = math.ceil(fps / MAX_VIDEO_FPS)
    path.parent.mkdir(parents=True, exist_ok=True)
    # Frames of odd size are stretched by a pixel: H.264 halves its colour channels.
    with imageio.get_writer(path, fps=fps / every, macro_block_size=2, quality=8) as writer:
        # One by one, because the frames of 1,000 steps take 700 MB together.
        yield lambda step, done: writer.append_data(env.render()) if done or step % every == 0 else None
