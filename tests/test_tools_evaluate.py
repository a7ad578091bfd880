"""tools/evaluate and support/evaluation: a saved model plays as its policy does, a bad one is told in one line."""

import json
import math
import shutil
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock, create_autospec

import envpool
import gymnasium as gym
import imageio.v2 as imageio
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scripts import ATARI, DISCRETE, FAST_SCRIPTS, KINDS, SCRIPTS, run, run_tool_in_process, tiny, tiny_env, with_long

from leanrl import cleanba_ppo
from leanrl.ppo_continuous_action import Agent
from leanrl.sebulba.environments import make_pool
from leanrl.support import evaluation
from leanrl.support.atari import AtariVectorEnv
from leanrl.support.cli import read_args_json
from leanrl.support.envs import make_envs
from leanrl.support.errors import UsageError
from leanrl.tools import evaluate


@pytest.fixture(scope="session")
def trained(script, tmp_path_factory):
    """A tiny training run on Hopper, CartPole or Breakout, whose episodes are short, with its model."""
    folder = tmp_path_factory.mktemp("trained")
    flags = ["--total-timesteps=512", "--save-model", "--runs-dir", folder, "--run-name=a"]
    assert run(script, *tiny(script), *flags, *["--channels=8", "--norm-obs"] * script.startswith("ppo_atari")) == 0
    return folder / "a"


@pytest.fixture
def run_dir(trained, tmp_path):
    """A copy of the training run, to change."""
    return Path(shutil.copytree(trained, tmp_path / "run"))


def write_run(run_dir: Path, script: str, model: dict, **args) -> Path:
    """Makes ``run_dir`` that of a run of ``script`` which saved ``model``."""
    run_dir.mkdir(exist_ok=True)
    (run_dir / "args.json").write_text(json.dumps({"script": script, "args": args}))
    torch.save({"model": model}, run_dir / "model.pt")
    return run_dir


def untrained(run_dir: Path, env_id: str, **args) -> Path:
    """A run directory with a random policy for ``env_id``."""
    torch.manual_seed(0)
    with gym.make(env_id) as env:
        obs_dim, action_dim = env.observation_space.shape[0], env.action_space.shape[0]
    model = {"obs_rms": {"mean": torch.zeros(obs_dim), "var": torch.ones(obs_dim)}}
    model["agent"] = Agent(obs_dim, action_dim).state_dict()
    return write_run(run_dir, "ppo_continuous_action", model, env_id=env_id, **args)


def returns_of(run_dir: Path) -> list[float]:
    return json.loads((run_dir / "evaluation.json").read_text())["returns"]


def policy_by_hand(model: dict, space: gym.Space):
    """The saved policy's best or mean action for an observation, none of our networks in the way."""

    def layers(x: torch.Tensor, names: list[str], activation) -> torch.Tensor:
        for name in names:
            x = F.linear(x, weights[f"{name}.weight"], weights[f"{name}.bias"])
            if name.startswith("fc") and (norm := name.replace("fc", "norm")) + ".weight" in weights:  # FastSAC's
                x = F.layer_norm(x, x.shape, weights[f"{norm}.weight"], weights[f"{norm}.bias"])
            x = x if name == names[-1] else activation(x)
        return x

    def normalized(obs: np.ndarray) -> torch.Tensor:
        rms = model["obs_rms"]
        return ((torch.as_tensor(obs) - rms["mean"]) / (rms["var"] + 1e-8).sqrt()).clamp(-10, 10).float()

    def ppo(obs: np.ndarray) -> np.ndarray:
        names = [f"actor_mean.{i}" for i in (0, 2, 4)]
        return np.clip(layers(normalized(obs), names, torch.tanh).numpy(), space.low, space.high)

    def actor(obs: np.ndarray) -> np.ndarray:
        head = "fc_mu" if "fc_mu.weight" in weights else "fc_heads"  # SAC's: the mean, then the standard deviation
        x = normalized(obs) if "obs_rms" in model else torch.as_tensor(obs).float()
        x = layers(x, ["fc1", "fc2", head], torch.relu)[: len(space.low)].tanh().numpy()
        return (space.high - space.low) / 2 * x + (space.high + space.low) / 2

    def q_network(obs: np.ndarray) -> int:
        x = torch.as_tensor(obs).float()
        if "6.weight" not in weights:
            return layers(x, ["0", "2", "4"], torch.relu).argmax().item()
        for linear, norm in (("0", "1"), ("3", "4")):  # PQN's
            x = layers(x, [linear], None)
            x = torch.relu(F.layer_norm(x, x.shape, weights[f"{norm}.weight"], weights[f"{norm}.bias"]))
        return layers(x, ["6"], None).argmax().item()

    policies = {"agent": ppo, "actor": actor, "q_network": q_network}
    (part,) = set(policies) & set(model)
    weights = model[part]
    return policies[part]


def play_by_hand(run_dir: Path, env_id: str, seed: int, episodes: int) -> tuple[tuple[float, ...], tuple[int, ...]]:
    """Returns and lengths of the saved policy in plain Gymnasium, no code of ours in the loop."""
    env = gym.make(env_id)
    act = policy_by_hand(torch.load(run_dir / "model.pt", weights_only=True)["model"], env.action_space)
    played = []
    for episode in range(episodes):
        obs, _ = env.reset(seed=evaluation_seed(seed, episode))
        rewards, over = [], False
        while not over:
            obs, reward, terminated, truncated, _ = env.step(act(obs))
            rewards.append(float(reward))
            over = terminated or truncated
        played.append((sum(rewards), len(rewards)))
    return tuple(zip(*played, strict=True))


# ------------------------------------------------------------------------------------------------------------ RETURNS


def test_the_same_seed_gives_the_same_returns(script, run_dir, monkeypatch, capsys):
    results = []
    for seed in (0, 0, 1):
        assert run_tool_in_process(monkeypatch, evaluate, run_dir, "--episodes", 5, "--seed", seed) == 0
        results.append(returns_of(run_dir))
    first, again, other = results
    assert first == again != other
    assert len(first) == 5 and len(set(first)) > 1

    content = json.loads((run_dir / "evaluation.json").read_text())
    told = {"script": script, "env_id": tiny_env(script), "seed": 1, "episodes": 5, "video": None}
    assert {**content, **told, "returns": other} == content
    printed = capsys.readouterr().out
    assert f" {evaluate.mean_std(first)} |" in printed
    assert f"{min(first):,.1f}" in printed and f"{max(first):,.1f}" in printed


@pytest.mark.parametrize("script", [name for name in SCRIPTS if name not in ATARI], indirect=True)
def test_returns_are_those_of_a_rollout_by_hand(script, trained):
    expected, lengths = play_by_hand(trained, tiny_env(script), seed=4, episodes=4)
    assert min(lengths) > 1
    np.testing.assert_allclose(evaluation.play(trained, 4, seed=4), expected, rtol=1e-6)


def evaluation_seed(seed: int, episode: int) -> int:
    """That of the environment which the tool plays an episode in with ``--seed``."""
    return int(np.random.SeedSequence([seed, 1_000_000 + episode]).generate_state(1)[0] >> 1)


def play_pools_by_hand(run_dir: Path, env_id: str, episodes: int, seed: int, **options) -> list[float]:
    """Returns in EnvPool's own loop; of an Atari game, over all its lives."""
    script = read_args_json(run_dir)["script"]
    model, returns = evaluation.load_model(run_dir), []
    for episode in range(episodes):
        seeds = [evaluation_seed(seed, episode)]
        pool = envpool.make(env_id, env_type="gymnasium", num_envs=1, seed=seeds, **options)
        space, is_dict = pool.observation_space, isinstance(pool.observation_space, gym.spaces.Dict)
        flat_space = gym.spaces.flatten_space(space) if is_dict else space
        spaces = {"single_observation_space": flat_space, "single_action_space": pool.action_space}
        policy = evaluation.training_script(run_dir, script).load_policy(model, SimpleNamespace(**spaces))
        (obs, _), score, over = pool.reset(), 0.0, False
        while not over:
            obs = gym.spaces.flatten(space, obs)[None] if is_dict else obs
            obs, reward, terminated, truncated, infos = pool.step(policy(obs).astype(pool.action_space.dtype))
            score += float(reward[0])
            over = truncated[0] or (infos["lives"][0] == 0 if "lives" in infos else terminated[0])
        returns.append(score)
    return returns


@pytest.mark.parametrize("script", with_long(ATARI), indirect=True)
def test_scores_are_those_of_whole_games_by_hand(script, trained, monkeypatch):
    """No lost life ends a game, rewards are the console's, actions are the policy's but for the random ones."""
    monkeypatch.setattr(evaluation, "RANDOM_ATARI_ACTIONS", 0.0)
    expected = play_pools_by_hand(trained, "Breakout-v5", episodes=3, seed=4, noop_max=30, episodic_life=True)
    assert evaluation.play(trained, 3, seed=4) == expected


@pytest.mark.parametrize("script", ATARI[1:2], indirect=True)
def test_an_agent_that_never_serves_loses_its_lives(script, trained, monkeypatch):
    """In training EnvPool serves the ball after a lost life; without that, time would have to run out."""
    wait = Mock(side_effect=lambda obs: np.zeros(len(obs), int))
    monkeypatch.setattr(f"leanrl.{script}.load_policy", lambda *_: wait)
    (score,) = evaluation.play(trained, 1)
    assert 0 <= score < 20 and 50 < wait.call_count < 2_000


@pytest.mark.parametrize("script", ATARI[1:2], indirect=True)
def test_one_action_in_a_hundred_is_random(script, trained, monkeypatch):
    sent, step = [], AtariVectorEnv.step
    monkeypatch.setattr(AtariVectorEnv, "step", lambda envs, actions: sent.extend(actions) or step(envs, actions))
    monkeypatch.setattr(f"leanrl.{script}.load_policy", lambda *_: lambda obs: np.zeros(len(obs), int))
    first = evaluation.play(trained, 10)
    shares = np.bincount(sent) / len(sent)
    assert 0.004 < shares[1:].sum() < 0.011 and min(shares) > 0  # a random action is the policy's in a quarter of cases
    assert evaluation.play(trained, 10) == first


@pytest.mark.parametrize("env_id", ["CartPole-v1", "LunarLander-v3", "Blackjack-v1"])
def test_distributed_agents_play_in_envpool(tmp_path, env_id):
    """Gymnasium has the three, too: with other dice, not without Box2D, and with other observations."""
    torch.manual_seed(0)
    with closing(make_pool(env_id, range(1), 1, "cleanba")) as spaces:
        agent = cleanba_ppo.make_agent(spaces.single_observation_space, spaces.single_action_space, cleanba_ppo.Args())
        model = {"agent": agent.state_dict(), "network": {}}
        run_dir = write_run(tmp_path, "cleanba_ppo", model, env_id=env_id, env_backend="envpool", protocol="cleanba")
    assert evaluation.play(run_dir, 3, seed=4) == play_pools_by_hand(run_dir, env_id, episodes=3, seed=4)


@pytest.mark.parametrize("script", [name for name in FAST_SCRIPTS if name not in ATARI])
def test_what_was_trained_on_envpool_is_filmed_and_plays_there(script, tmp_path):
    """Gymnasium needs Box2D for it."""
    env_id = "LunarLander-v3" if script in DISCRETE else "LunarLanderContinuous-v3"
    flags = ["--env-backend=envpool", f"--env-id={env_id}", "--capture-video", "--total-timesteps=512"]
    assert run(script, *tiny(script), *flags, "--runs-dir", tmp_path, "--run-name=run") == 0
    frames = np.stack(imageio.mimread(tmp_path / "run" / "videos" / "episode.mp4", memtest=False)).astype(int)
    assert frames.shape[1:] == (400, 600, 3) and np.abs(frames[-1] - frames[0]).mean() > 0.5

    expected = play_pools_by_hand(tmp_path / "run", env_id, episodes=2, seed=4)
    # Networks round differently if they see both environments at once.
    assert evaluation.play(tmp_path / "run", 2, seed=4) == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("script", ATARI[1:2], indirect=True)
def test_sticky_actions(run_dir, tmp_path, refusal):
    assert evaluation.play(run_dir, 3) != evaluation.play(run_dir, 3, sticky=True)
    assert "--sticky: Hopper-v5 has none" in refusal(evaluate, untrained(tmp_path / "hopper", "Hopper-v5"), "--sticky")


def test_an_episode_ends_at_its_time_limit(tmp_path):
    """In dm_control, whose observations are a Dict."""
    flags = ["--env-backend=envpool", "--env-id=CheetahRun-v1", "--save-model", "--total-timesteps=512"]
    script = "td3_continuous_action_torchcompile"
    assert run(script, *tiny(script), *flags, "--runs-dir", tmp_path, "--run-name=run") == 0
    expected = play_pools_by_hand(tmp_path / "run", "CheetahRun-v1", episodes=2, seed=4)
    assert evaluation.play(tmp_path / "run", 2, seed=4) == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("script", KINDS[:1], indirect=True)
def test_many_runs_one_without_a_model(run_dir, tmp_path, monkeypatch, capsys):
    shutil.copytree(run_dir, tmp_path / "bare", ignore=shutil.ignore_patterns("model.pt"))
    reacher = untrained(tmp_path / "reacher", "Reacher-v5")
    assert run_tool_in_process(monkeypatch, evaluate, run_dir, tmp_path / "bare", reacher, "--episodes", 1) == 2
    out, err = capsys.readouterr()
    assert err == f"evaluate: {tmp_path}/bare: has no model.pt; train with --save-model\n"
    assert [line.split("|")[2].strip() for line in out.splitlines()[2:]] == ["Hopper-v5", "Reacher-v5"]


# ------------------------------------------------------------------------------------------------------------- ERRORS


def test_what_is_no_run_directory(tmp_path, refusal):
    for path in (tmp_path / "nowhere", tmp_path):
        assert "args.json: No such file or directory" in refusal(evaluate, path)
    (tmp_path / "args.json").write_text("{}")
    assert all("args.json" in refusal(evaluate, path) for path in (tmp_path, tmp_path / "args.json"))


@pytest.mark.parametrize("content", [b"", b"garbage", b"PK\x03\x04 torn"])
def test_a_damaged_model(tmp_path, content, refusal):
    run_dir = untrained(tmp_path / "run", "Hopper-v5")
    (run_dir / "model.pt").write_bytes(content)
    assert f"{run_dir}/model.pt: damaged or not a saved model" in refusal(evaluate, run_dir)
    assert not (run_dir / "evaluation.json").exists()


def test_a_model_of_another_environment(tmp_path, refusal):
    run_dir, other = (untrained(tmp_path / env_id, env_id) for env_id in ("Hopper-v5", "Reacher-v5"))
    shutil.copy(other / "model.pt", run_dir)
    assert "does not fit ppo_continuous_action" in refusal(evaluate, run_dir)


@pytest.mark.parametrize("script", ["os", "support.run", "tools.evaluate", "__init__", "../tests/conftest", ""])
def test_a_file_cannot_choose_what_is_imported(tmp_path, monkeypatch, script, refusal):
    run_dir = write_run(tmp_path / "run", script, {}, env_id="Hopper-v5")
    monkeypatch.setattr(evaluation, "importlib", None)
    assert "is not a script of this version" in refusal(evaluate, run_dir)


@pytest.mark.parametrize("flags", [["--episodes=0"], ["--episodes=-3"], ["--seed=-1"]])
def test_bad_numbers(tmp_path, flags, refusal):
    assert flags[0].split("=")[0] in refusal(evaluate, untrained(tmp_path / "run", "Hopper-v5"), *flags)


# -------------------------------------------------------------------------------------------------------------- VIDEO


@pytest.fixture(scope="session")
def opengl():
    try:
        evaluation.require_video("Hopper-v5")
    except UsageError as error:
        pytest.skip(str(error))


def test_video_shows_the_first_episode(opengl, tmp_path, monkeypatch, capsys):
    run_dir = untrained(tmp_path / "run", "Hopper-v5")
    expected, lengths = play_by_hand(run_dir, "Hopper-v5", seed=2, episodes=2)
    assert run_tool_in_process(monkeypatch, evaluate, run_dir, "--episodes", 2, "--seed", 2, "--capture-video") == 0
    # Filming changes nothing.
    np.testing.assert_allclose(returns_of(run_dir), expected, rtol=1e-6)
    path = run_dir / "videos" / "evaluation_seed2.mp4"
    assert f"video: {path}" in capsys.readouterr().out
    assert list(path.parent.iterdir()) == [path]

    frames = np.stack(imageio.mimread(path, memtest=False)).astype(int)
    # Hopper takes 125 steps a second: one frame before the first step, one after every fifth, and the last.
    assert frames.shape == (1 + math.ceil(lengths[0] / 5), 480, 480, 3)
    assert imageio.get_reader(path).get_meta_data()["fps"] == 25
    assert frames[0].std() > 10
    assert (np.abs(np.diff(frames, axis=0)).mean((1, 2, 3)) > 0).all()
    assert np.abs(frames[-1] - frames[0]).mean() > 0.5


def test_the_camera_follows(opengl):
    with closing(evaluation.make_evaluation_envs({"env_id": "HalfCheetah-v5"}, 1, 0, True, None)) as envs:
        envs.reset()
        envs.render()
        envs.envs[0].unwrapped.data.qpos[0] = 20
        envs.step(np.zeros((1, 6)))
        assert (np.ptp(envs.render(), axis=2) > 60).sum() > 1_000  # the cheetah; the floor has hardly any colour


FILMED = [("CartPole-v1", "gymnasium", (400, 600, 3)), ("MiniGrid-Empty-5x5-v0", "envpool", (160, 160, 3))]


@pytest.mark.parametrize("env_id, backend, shape", FILMED, ids=["numbers", "Dict"])
def test_vectors_and_dicts_are_filmed(env_id, backend, shape, tmp_path, capfd):
    flags = [f"--env-id={env_id}", f"--env-backend={backend}", "--capture-video", "--total-timesteps=512"]
    assert run("dqn_torchcompile", *tiny("dqn_torchcompile"), *flags, "--runs-dir", tmp_path, "--run-name=run") == 0
    frames = np.stack(imageio.mimread(tmp_path / "run" / "videos" / "episode.mp4", memtest=False)).astype(int)
    assert frames.shape[1:] == shape and np.abs(frames[3] - frames[0]).max() > 50
    assert capfd.readouterr().err == ""  # no complaint about a screen that is missing, say


@pytest.mark.parametrize("script", ATARI[1:2], indirect=True)
def test_video_of_a_game_shows_the_console(run_dir, monkeypatch):
    rendered, render = [], AtariVectorEnv.render
    recv = create_autospec(AtariVectorEnv.recv, side_effect=AtariVectorEnv.recv)
    score = evaluation.play(run_dir, 1)
    monkeypatch.setattr(AtariVectorEnv, "render", lambda self: rendered.append(render(self).copy()) or rendered[-1])
    monkeypatch.setattr(AtariVectorEnv, "recv", recv)
    assert run_tool_in_process(monkeypatch, evaluate, run_dir, "--episodes", 1, "--capture-video") == 0
    assert returns_of(run_dir) == score  # filming changes nothing
    path = run_dir / "videos" / "evaluation_seed0.mp4"
    frames = np.stack(imageio.mimread(path, memtest=False)).astype(int)
    assert frames.shape == (1 + recv.call_count, 210, 160, 3) and recv.call_count > 100
    assert imageio.get_reader(path).get_meta_data()["fps"] == 15
    # The codec's own error, next to which another step's frame is far.
    errors = np.abs(frames - np.stack(rendered)).mean((1, 2, 3))
    assert errors.max() < 3
    # Breakout's bricks are in colour.
    assert np.ptp(frames[0], axis=2).max() > 100
    assert (np.abs(np.diff(frames, axis=0)).sum((1, 2, 3)) > 0).mean() > 0.5


TASKS = "Ant", "HalfCheetah", "Hopper", "Humanoid", "InvertedDoublePendulum", "InvertedPendulum", "Swimmer", "Walker2d"


@pytest.mark.parametrize("env_id", [f"{task}-{version}" for task in TASKS for version in ("v4", "v5")])
def test_mujoco_tasks_of_envpool_can_be_filmed_as_gymnasiums(env_id):
    assert evaluation.filming_backend(env_id, "envpool") == "gymnasium"
    theirs, envs = envpool.make_spec(env_id), make_envs(env_id, 1, seed=1)
    assert theirs.gymnasium_observation_space.shape == envs.single_observation_space.shape
    np.testing.assert_allclose(theirs.gymnasium_action_space.low, envs.single_action_space.low, rtol=1e-6)
    np.testing.assert_allclose(theirs.gymnasium_action_space.high, envs.single_action_space.high, rtol=1e-6)


def test_hopper_on_envpool_plays_there_and_is_filmed_in_gymnasium(opengl, tmp_path, monkeypatch):
    run_dir = untrained(tmp_path / "run", "Hopper-v5", env_backend="envpool")
    (filmed,), _ = play_by_hand(run_dir, "Hopper-v5", seed=0, episodes=1)
    assert run_tool_in_process(monkeypatch, evaluate, run_dir, "--episodes", 1, "--capture-video") == 0
    assert returns_of(run_dir) == pytest.approx([filmed], rel=1e-6)
    assert abs(evaluation.play(run_dir, 1)[0] - filmed) > 1  # other dice
    assert (run_dir / "videos" / "evaluation_seed0.mp4").exists()


@pytest.mark.parametrize(
    "env_id, reason",
    [("Blackjack-v1", "cannot film"), ("CheetahRun-v1", "cannot film"), ("Blackjak-v1", "is not an EnvPool")],
)
def test_what_envpool_cannot_draw_is_refused_before_training(tmp_path, capsys, env_id, reason):
    flags = ["--env-backend=envpool", f"--env-id={env_id}", "--capture-video", "--runs-dir", tmp_path / "runs"]
    assert run("dqn_torchcompile", *flags) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert env_id in line and reason in line
    assert not (tmp_path / "runs").exists()


def test_frames_of_odd_size(tmp_path):
    shades = iter(range(0, 200, 20))
    env = SimpleNamespace(metadata={}, render=lambda: np.full((61, 47, 3), next(shades), np.uint8))
    with evaluation.film(env, tmp_path / "videos" / "odd.mp4") as show:
        for step in range(10):
            show(step, done=False)
    frames = np.stack(imageio.mimread(tmp_path / "videos" / "odd.mp4"))
    assert frames.shape == (10, 62, 48, 3)
    np.testing.assert_allclose(frames.mean((1, 2, 3)), range(0, 200, 20), atol=3)


def test_without_opengl_the_remedy_is_told(tmp_path, monkeypatch, refusal):
    no_opengl = AttributeError("'NoneType' object has no attribute 'eglQueryString'")
    monkeypatch.setattr(gym.wrappers.OrderEnforcing, "render", Mock(side_effect=no_opengl))
    run_dir = untrained(tmp_path / "run", "Hopper-v5")
    line = refusal(evaluate, run_dir, "--capture-video")
    assert line.startswith("evaluate: --capture-video: cannot film Hopper-v5 here: 'NoneType' object")
    assert "install libegl1" in line
    assert not (run_dir / "videos").exists() and not (run_dir / "evaluation.json").exists()
