"""One run of a peer: a library's algorithm, with the hyperparameters and flags of our script for it.

`leanrl.tools.compare` starts it for contenders like sb3:PPO. It leaves a run directory as our scripts do, and the same
code measures its speed. JAX compiles during the first updates, so these count as warm-up: PPO's first iteration, and
off-policy all steps before learning_starts plus 50 rounds of updates. The clock stops when the last update is done. To
add a peer, add a line to PEERS and the functions that it names.

    python -m leanrl.tools.peers sb3:PPO --total-timesteps 20480
    python -m leanrl.tools.peers sbx:SAC --total-timesteps 6000 --learning-starts 1000
    python -m leanrl.tools.peers rl_games:PPO --num-envs 64 --num-steps 256 --env-backend envpool

How the peers differ from our reference, as of Stable-Baselines3 2.9, SBX 0.28 and rl_games 1.6 (flags of the reference
that mean something else to a peer are refused):
- SB3 and SBX step several environments in one process (DummyVecEnv), as our reference does. SBX and SB3's PPO compute
  on the CPU, whatever --device is.
- PPO: SBX ignores clip_range_vf (it takes the argument and does not use it), gives policy and value separate
  optimisers and gradient clips, and initialises only the policy's last layer orthogonally. Both anneal the learning
  rate from the second iteration's value, down to 0 for the last.
- PPO of rl_games takes the flags of our fast variant and steps the same environments, on EnvPool too; it counts the
  step that only resets as an ordinary step, and adds it to the next episode's length. It compiles its model, as is its
  default. It normalises returns instead of rewards, and advantages over the whole rollout; its minibatches are the same
  in every epoch, not drawn anew. Actions are clipped to [-1, 1] and scaled to their bounds. On truncation it adds the
  discounted value of the state before the last step. Layers have PyTorch's default initialisation.
- PPO on Atari: SB3 only, on our environments over EnvPool; it counts the step that only resets as an ordinary step.
- SAC, TD3 and DQN: their replays keep observations in the environment's type, float64 for MuJoCo; ours keep float32. A
  round of theirs is a whole number of steps and of updates: 4 environments with updates_per_step 0.1 have 2 updates
  after every 5 steps, where ours have one after every second or third. A run ends after a whole round.
- SAC: SB3 has one learning rate, here policy_lr. SBX has q_lr for the critics and policy_lr for the entropy
  coefficient, where ours has q_lr. Both train the actor in every update; ours trains it policy_frequency times in every
  policy_frequency-th update, so as often. Their loss for the entropy coefficient is -log(alpha) * (log_pi + target) on
  the actions that trained the actor; ours is -alpha * (log_pi + target) on newly sampled actions, which takes one more
  pass through the actor. They halve the squared error of the critics (a factor that Adam divides out), and clip log_std
  to [-20, 2]; ours squashes it into [-5, 2].
- TD3: SBX updates the targets in every update, SB3 and ours in every policy_frequency-th. SBX trains the actor on the
  lower of both critics, SB3 and ours on the first. SBX halves the squared error. Both add the exploration noise also to
  the random actions before learning_starts.
- DQN: SBX's hidden layers are 120 and 120 (it reads only the first number), SB3's and ours 120 and 84. Both use the
  Huber loss, with which our hyperparameters do not learn CartPole; ours uses the squared error. Before learning_starts
  they act at random, ours epsilon-greedily. With several environments they decide once for all whether to explore. SB3
  computes the gradient norm only to clip it at infinity.
"""

import importlib
import importlib.resources
import os
import sys
from collections.abc import Callable
from fractions import Fraction
from functools import partial
from typing import Any, NamedTuple

import cloudpickle
import numpy as np
import torch

from leanrl.support.atari import CLEANRL, make_atari_envs, whole_games
from leanrl.support.cli import parse_args
from leanrl.support.devices import resolve_device
from leanrl.support.envs import make_env, make_envs, require_continuous_actions, require_discrete_actions
from leanrl.support.episodes import EpisodeStatistics
from leanrl.support.errors import UsageError, bad, pip_command
from leanrl.support.run import Run

WARMUP_ROUNDS = 50
"""Rounds of updates before an off-policy peer's clock starts: JAX compiles in the first few."""


# ---------------------------------------------------------------------------------------------------------------- PPO


def ppo(args, module: str, envs) -> Any:
    """The peer's PPO with our reference's hyperparameters and network."""
    if len(envs.observation_space.shape) == 1:
        # Small networks: both peers advise against a GPU.
        policy, device = "MlpPolicy", "cpu"
        tanh = torch.nn.Tanh if module == "stable_baselines3" else importlib.import_module("flax.linen").tanh
        network = {"net_arch": {"pi": [64, 64], "vf": [64, 64]}, "activation_fn": tanh}
    else:
        policy, device, network = "CnnPolicy", resolve_device(args), {"net_arch": []}
    return importlib.import_module(module).PPO(
        policy,
        envs,
        learning_rate=(lambda remaining: remaining * args.learning_rate) if args.anneal_lr else args.learning_rate,
        n_steps=args.num_steps,
        batch_size=args.num_envs * args.num_steps // args.num_minibatches,
        n_epochs=args.update_epochs,
        gamma=args.gamma,
        gae_lambda=args.gae_lambda,
        clip_range=args.clip_coef,
        clip_range_vf=args.clip_coef if args.clip_vloss else None,
        normalize_advantage=args.norm_adv,
        ent_coef=args.ent_coef,
        vf_coef=args.vf_coef,
        max_grad_norm=args.max_grad_norm,
        # Adam's eps is 1e-5 in both by default.
        policy_kwargs={**network, "ortho_init": True},
        seed=args.seed,
        device=device,
    )


def rl_games_ppo(args, module: str, envs) -> Any:
    """rl_games' PPO Runner: its configuration for HalfCheetah, with our hyperparameters and network."""
    import yaml

    configuration = importlib.resources.files(module) / "configs" / "mujoco" / "halfcheetah_envpool.yaml"
    params = yaml.safe_load(configuration.read_text())["params"]
    mlp = {"units": [64, 64], "activation": "tanh", "initializer": {"name": "default"}}
    params |= {"seed": args.seed, "torch_threads": args.num_threads or "auto"}
    params["network"] |= {"separate": True, "mlp": mlp}
    params["config"] |= {
        "vec_env": envs,
        "env_info": envs.get_env_info(),
        "device": str(resolve_device(args)),
        "learning_rate": args.learning_rate,
        "lr_schedule": "linear" if args.anneal_lr else None,
        "num_actors": args.num_envs,
        "horizon_length": args.num_steps,
        "minibatch_size": args.num_envs * args.num_steps // args.num_minibatches,
        "mini_epochs": args.update_epochs,
        "gamma": args.gamma,
        "tau": args.gae_lambda,
        "e_clip": args.clip_coef,
        "use_smooth_clamp": False,
        "clip_value": args.clip_vloss,
        "normalize_advantage": args.norm_adv,
        "entropy_coef": args.ent_coef,
        "critic_coef": args.vf_coef,
        "grad_norm": args.max_grad_norm,
        "print_stats": False,
    }
    runner = importlib.import_module(f"{module}.torch_runner").Runner()
    runner.load_config(params)
    runner.device = torch.device(params["config"]["device"])
    return runner


class Timing(NamedTuple):
    """When a peer's algorithm learns; all but the last are in environment steps."""

    round_steps: int
    """between updates: the run ends after a whole number of rounds"""
    warmup_steps: int
    """the clock starts at the first round after these"""
    log_every: int
    update_steps: int
    """gradient steps for each update that the algorithm counts"""


def ppo_timing(args) -> Timing:
    """The first iteration is the warm-up; every other is logged."""
    if args.target_kl is not None:
        raise bad("target_kl", args.target_kl, "means something else in each peer; leave it out")
    steps = args.num_envs * args.num_steps
    return Timing(round_steps=steps, warmup_steps=steps, log_every=steps, update_steps=args.num_minibatches)


# -------------------------------------------------------------------------------------------------- SAC, TD3 AND DQN


def updates_of_round(args) -> Fraction:
    """The ratio of updates to vector steps in a round, which matches the reference's updates_per_step."""
    ratio = Fraction(args.updates_per_step * args.num_envs).limit_denominator(10_000)
    if not ratio:
        raise bad("updates_per_step", args.updates_per_step, "is less than the peers can do; try 0.001")
    return ratio


def off_policy_timing(args) -> Timing:
    """The warm-up goes WARMUP_ROUNDS beyond learning_starts."""
    steps = args.num_envs * updates_of_round(args).denominator
    warmup_steps = args.learning_starts + WARMUP_ROUNDS * steps
    return Timing(round_steps=steps, warmup_steps=warmup_steps, log_every=args.log_every, update_steps=1)


def off_policy_arguments(args, envs) -> dict:
    """What the three algorithms of both peers have in common."""
    ratio = updates_of_round(args)
    return {
        "policy": "MlpPolicy",
        "env": envs,
        "buffer_size": args.buffer_size,
        "learning_starts": args.learning_starts,
        "batch_size": args.batch_size,
        "tau": args.tau,
        "gamma": args.gamma,
        "train_freq": ratio.denominator,
        "gradient_steps": ratio.numerator,
        "seed": args.seed,
        "device": resolve_device(args),
    }


def sac_timing(args) -> Timing:
    """As for all off-policy algorithms, but refuses two flags that the peers lack."""
    for name, only in (("target_network_frequency", 1), ("policy_updates", None)):
        if (value := getattr(args, name)) != only:
            raise bad(name, value, "is a setting that the peers do not have; leave it out")
    return off_policy_timing(args)


def sac(args, module: str, envs) -> Any:
    """The peer's SAC with our reference's hyperparameters."""
    return importlib.import_module(module).SAC(
        **off_policy_arguments(args, envs),
        learning_rate=args.policy_lr,
        **({"qf_learning_rate": args.q_lr} if module == "sbx" else {}),
        ent_coef="auto" if args.autotune else args.alpha,
        target_entropy="auto",
        policy_kwargs={"net_arch": [256, 256]},
    )


def td3(args, module: str, envs) -> Any:
    """The peer's TD3 with our reference's hyperparameters."""
    from stable_baselines3.common.noise import NormalActionNoise

    (action_dim,) = envs.action_space.shape
    return importlib.import_module(module).TD3(
        **off_policy_arguments(args, envs),
        learning_rate=args.learning_rate,
        policy_delay=args.policy_frequency,
        target_policy_noise=args.policy_noise,
        target_noise_clip=args.noise_clip,
        action_noise=NormalActionNoise(np.zeros(action_dim), np.full(action_dim, args.exploration_noise)),
        policy_kwargs={"net_arch": [256, 256]},
    )


def dqn(args, module: str, envs) -> Any:
    """The peer's DQN with our reference's hyperparameters."""
    return importlib.import_module(module).DQN(
        **off_policy_arguments(args, envs),
        learning_rate=args.learning_rate,
        target_update_interval=args.target_network_frequency,
        exploration_fraction=args.exploration_fraction,
        exploration_initial_eps=args.start_e,
        exploration_final_eps=args.end_e,
        **({"max_grad_norm": float("inf")} if module == "stable_baselines3" else {}),
        policy_kwargs={"net_arch": [120, 84]},
    )


# ------------------------------------------------------------------------------------------------------- ENVIRONMENTS


def plain_envs(args, require_actions: Callable) -> Any:
    """The environments of the reference, stepped in this process; UsageError if it would refuse them."""
    from stable_baselines3.common.env_util import make_vec_env

    probe = make_envs(args.env_id, 1, args.seed)
    require_actions(probe, args.env_id)
    probe.close()
    return make_vec_env(lambda: make_env(args.env_id), args.num_envs, seed=args.seed)


continuous_envs = partial(plain_envs, require_actions=require_continuous_actions)
discrete_envs = partial(plain_envs, require_actions=require_discrete_actions)


def normalized_envs(args) -> Any:
    """The peers' counterpart of our PPO's wrappers; their algorithms clip the actions."""
    from stable_baselines3.common.vec_env import VecNormalize

    return VecNormalize(
        continuous_envs(args), norm_obs=True, norm_reward=True, clip_obs=10.0, clip_reward=10.0, gamma=args.gamma
    )


def rl_games_envs(args) -> Any:
    """Our environments in rl_games' interface, with their own autoreset: a step that only resets counts as a step."""
    from rl_games.common.ivecenv import IVecEnv

    envs = make_envs(args.env_id, args.num_envs, args.seed, args.env_backend)
    require_continuous_actions(envs, args.env_id)

    class Envs(IVecEnv):
        """The interface that rl_games asks of environments."""

        close = envs.close

        def get_env_info(self) -> dict:
            return {"observation_space": envs.single_observation_space, "action_space": envs.single_action_space}

        def reset(self) -> np.ndarray:
            return envs.reset()[0]

        def step(self, actions: np.ndarray):
            obs, rewards, terminations, truncations, _ = envs.step(actions)
            return obs, rewards, terminations | truncations, {"time_outs": truncations}

    return Envs()


def atari_envs(args) -> Any:
    """Our Atari environments as an SB3 VecEnv, with their own autoreset: a step that only resets counts as a step."""
    from stable_baselines3.common.vec_env import VecEnv

    envs = make_atari_envs(args.env_id, args.num_envs, args.seed, CLEANRL)

    class AtariVecEnv(VecEnv):
        """Also the Monitors that the callback reads: returns and lengths of each environment's whole games."""

        step_async = envs.send
        close = envs.close
        set_attr = env_method = None  # no one calls them

        def __init__(self) -> None:
            super().__init__(envs.num_envs, envs.single_observation_space, envs.single_action_space)
            self.games = EpisodeStatistics(envs.num_envs)
            self.ended = {name: [[] for _ in range(envs.num_envs)] for name in ("episode_returns", "episode_lengths")}

        def reset(self) -> np.ndarray:
            self.resets = np.zeros(self.num_envs, bool)
            return envs.reset()[0]

        def step_wait(self):
            obs, rewards, terminations, truncations, infos = envs.recv()
            dones = terminations | truncations
            scores, ends = whole_games(rewards, dones, infos)
            ended = self.games.add_step(scores, ends, self.resets)
            for values, all_ended in zip(ended, self.ended.values(), strict=True):
                for i, value in zip(np.flatnonzero(ends), values, strict=True):
                    all_ended[i].append(value)
            self.resets = dones
            # SB3 bootstraps truncated episodes from this observation.
            infos: list[dict] = [{} for _ in range(self.num_envs)]
            for i in np.flatnonzero(dones):
                ran_out = bool(truncations[i] and not terminations[i])
                infos[i] = {"TimeLimit.truncated": ran_out, "terminal_observation": obs[i]}
            return obs, rewards, dones, infos

        def get_attr(self, attr_name: str, indices=None) -> list:
            return self.ended.get(attr_name) or [None] * self.num_envs

        def env_is_wrapped(self, wrapper_class, indices=None) -> list[bool]:
            # It stands in for a Monitor.
            return [wrapper_class.__name__ == "Monitor"] * self.num_envs

    return AtariVecEnv()


# ------------------------------------------------------------------------------------------------------------- LEARNING


def learn(model, run: Run, timing: Timing) -> None:
    """Trains an SB3 or SBX model to the end of ``run``; logs every ``timing.log_every`` steps after the warm-up."""
    from stable_baselines3.common.callbacks import BaseCallback

    class Recorder(BaseCallback):
        """Keeps ``run`` up to date."""

        def _on_training_start(self) -> None:
            self.episodes_seen = [0] * self.training_env.num_envs
            self.next_stop = timing.warmup_steps
            # It starts again after the warm-up, but a run that is interrupted before that needs a speed too.
            run.start_clock()

        def _on_rollout_start(self) -> None:
            # The previous round is done, updates included. Off-policy, a round may be a single step: keep this short.
            self.is_stopped = run.stop_requested
            if self.num_timesteps < self.next_stop and not self.is_stopped:
                return
            self.update()
            if run.warmup_seconds or self.is_stopped:
                run.log({})
            else:
                run.start_clock()
            self.next_stop = (self.num_timesteps // timing.log_every + 1) * timing.log_every

        def _on_step(self) -> bool:
            return not self.is_stopped

        def _on_training_end(self) -> None:
            if not self.is_stopped:  # one step into the next round, which does not count
                self.update()
                run.log({})

        def update(self) -> None:
            run.global_step = self.num_timesteps
            run.optimizer_steps = self.model._n_updates * timing.update_steps
            # Read from the environments' Monitors now and then, which costs the peer's steps nothing.
            returns, lengths = (self.training_env.get_attr(f"episode_{name}") for name in ("returns", "lengths"))
            for i, seen in enumerate(self.episodes_seen):
                run.record_episodes(returns[i][seen:], lengths[i][seen:])
                self.episodes_seen[i] = len(returns[i])

    run.model = partial(pickled, sb3_actions, model.policy, model.get_vec_normalize_env())
    model.learn(run.total_steps, callback=Recorder())


def learn_rl_games(runner, run: Run, timing: Timing) -> None:
    """Runs an rl_games Runner's training to the end of ``run``; logs every iteration after the first."""
    from rl_games.common.algo_observer import AlgoObserver

    config = runner.params["config"]

    class Recorder(AlgoObserver):
        """Keeps ``run`` up to date."""

        def after_init(self, algo) -> None:
            self.algo = algo
            run.model = self.snapshot

        def snapshot(self) -> dict:
            # The moments are a TorchScript module, which cannot be pickled.
            model, space = self.algo.model, self.algo.env_info["action_space"]
            return pickled(rl_games_actions, model.a2c_network, model.running_mean_std.state_dict(), space)

        def process_infos(self, infos: dict, done_indices: torch.Tensor) -> None:
            # rl_games forgets the finished episodes after this call.
            if len(done_indices):
                counts = self.algo.current_rewards, self.algo.current_lengths
                run.record_episodes(*(count[done_indices].flatten().tolist() for count in counts))

        def after_print_stats(self, frame: int, epoch_num: int, total_time: float) -> None:
            # Called at the end of an iteration, updates included.
            is_stopped = run.stop_requested
            run.global_step = epoch_num * timing.round_steps
            run.optimizer_steps = epoch_num * timing.update_steps * config["mini_epochs"]
            if run.global_step > timing.warmup_steps or is_stopped:
                run.log({})
            else:
                run.start_clock()
            if is_stopped:
                self.algo.max_epochs = epoch_num

    config |= {"train_dir": str(run.dir), "full_experiment_name": "rl_games"}
    config["max_epochs"] = run.total_steps // timing.round_steps
    config["features"]["observer"] = Recorder()
    # It starts again after the warm-up, but a run that is interrupted before that needs a speed too.
    run.start_clock()
    runner.run_train({})


# ------------------------------------------------------------------------------------------------------------- PLAYING


def pickled(actions: Callable, *of) -> dict:
    """A snapshot of a peer's policy, which is ``actions(*of, obs)``."""
    return {"policy": cloudpickle.dumps(partial(actions, *of))}


def load_policy(model: dict, envs) -> Callable[[np.ndarray], np.ndarray]:
    """The policy of a snapshot, like the scripts' functions of this name."""
    return cloudpickle.loads(model["policy"])


def sb3_actions(policy, normalizer, obs: np.ndarray) -> np.ndarray:
    """The best actions of an SB3 or SBX policy."""
    if normalizer is not None:
        obs = normalizer.normalize_obs(obs)
    return policy.predict(obs, deterministic=True)[0]


@torch.no_grad()
def rl_games_actions(network, moments: dict, space, obs: np.ndarray) -> np.ndarray:
    """The mean actions of an rl_games policy; observations are normalised and actions scaled as in its player."""
    from rl_games.algos_torch.players import rescale_actions

    deviation = (moments["running_var"] + 1e-5).sqrt()
    normalized = ((torch.as_tensor(obs) - moments["running_mean"]) / deviation).clamp(-5.0, 5.0)
    means, *_ = network.eval()({"obs": normalized.float()})
    return rescale_actions(*map(torch.as_tensor, (space.low, space.high)), means.clamp(-1.0, 1.0)).numpy()


# --------------------------------------------------------------------------------------------------------------- PEERS


class Peer(NamedTuple):
    """A library's algorithm."""

    module: str
    """the library's module"""
    script: str
    """our script of the algorithm, whose flags it takes: the eager reference, or for --env-backend the fast variant"""
    make_model: Callable
    """(the script's arguments, module, environments) -> the library's algorithm"""
    make_envs: Callable
    timing: Callable[[Any], Timing]
    """raises UsageError for arguments that mean something else to the library"""
    learn: Callable = learn
    """(what ``make_model`` returns, run, timing)"""


def peers_of(name: str, module: str) -> dict[str, Peer]:
    """The peers that both SB3 and SBX have."""
    return {
        f"{name}:PPO": Peer(module, "ppo_continuous_action", ppo, normalized_envs, ppo_timing),
        f"{name}:SAC": Peer(module, "sac_continuous_action", sac, continuous_envs, sac_timing),
        f"{name}:TD3": Peer(module, "td3_continuous_action", td3, continuous_envs, off_policy_timing),
        f"{name}:DQN": Peer(module, "dqn", dqn, discrete_envs, off_policy_timing),
    }


PEERS = {
    **peers_of("sb3", "stable_baselines3"),
    **peers_of("sbx", "sbx"),
    "sb3:PPO-Atari": Peer("stable_baselines3", "ppo_atari_envpool", ppo, atari_envs, ppo_timing),
    "rl_games:PPO": Peer(
        "rl_games", "ppo_continuous_action_torchcompile", rl_games_ppo, rl_games_envs, ppo_timing, learn_rl_games
    ),
}

PACKAGES = {"stable_baselines3": ("stable_baselines3",), "sbx": ("sbx-rl", "jax"), "rl_games": ("rl_games",)}
"""Packages whose versions are recorded, by module."""


def install(peer: Peer) -> str:
    """The command that installs the peer's library."""
    return pip_command("rl_games", "--no-deps") if peer.module == "rl_games" else pip_command("peers")


def plan(name: str, args) -> tuple[Timing, int]:
    """When a peer learns with the reference's validated arguments, and at which step it ends.

    Raises:
        UsageError: arguments that the peer cannot take, or too few steps.
    """
    if args.amp != "none":
        raise bad("amp", args.amp, "the peers have no such mode; leave it out")
    timing = PEERS[name].timing(args)
    total_steps = args.total_timesteps // timing.round_steps * timing.round_steps
    if total_steps < timing.warmup_steps + timing.round_steps:
        needed = f"a warm-up of {timing.warmup_steps} steps and a round of {timing.round_steps}"
        raise bad("total_timesteps", args.total_timesteps, f"is less than {needed}")
    return timing, total_steps


# ---------------------------------------------------------------------------------------------------------------- MAIN


def main(name: str, argv: list[str]) -> None:
    peer = PEERS[name]
    reference = importlib.import_module(f"leanrl.{peer.script}")
    args = parse_args(reference.Args, peer.script, argv)
    if not any(word.startswith(("--num-threads", "--num_threads")) for word in argv):
        args.num_threads = None  # the library's own choice, not our script's
    reference.validate(args)
    timing, total_steps = plan(name, args)
    # Before jax is imported, as it reads these variables. SBX ignores its argument `device`.
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    if args.num_threads is not None:
        torch.set_num_threads(args.num_threads)
    if args.num_threads == 1:
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_cpu_multi_thread_eigen=false"
    envs = peer.make_envs(args)
    model = peer.make_model(args, peer.module, envs)
    device = torch.device("cpu") if peer.module == "sbx" else model.device
    with Run(args, f"{name}.py", device, total_steps) as run:
        peer.learn(model, run, timing)
        if args.snapshot_seconds is not None:
            run._save_snapshot()
        run.model = None  # `finish` would print advice that holds only for our scripts
        run.finish({})
    envs.close()


if __name__ == "__main__":
    if len(sys.argv) < 2 or sys.argv[1] not in PEERS:
        sys.exit(f"usage: python -m leanrl.tools.peers {{{','.join(PEERS)}}} [FLAGS]")
    try:
        main(sys.argv[1], sys.argv[2:])
    except UsageError as error:
        print(f"{sys.argv[1]}: {error}", file=sys.stderr)
        raise SystemExit(2) from None
