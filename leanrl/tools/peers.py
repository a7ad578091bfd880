"""One run of a peer: a library's algorithm with the hyperparameters and flags of our script of the same.

`leanrl.tools.compare` starts it for contenders like sb3:PPO. It leaves a run directory as our scripts do, its speed
measured by the same code. JAX compiles in the first updates, so these are warm-up: PPO's first iteration, and
off-policy what comes before learning_starts with 50 rounds of updates more. The clock stops when the last update is
done. A further peer is a line of PEERS, with what that names.

    python -m leanrl.tools.peers sb3:PPO --total-timesteps 20480
    python -m leanrl.tools.peers sbx:SAC --total-timesteps 6000 --learning-starts 1000
    python -m leanrl.tools.peers rl_games:PPO --num-envs 64 --num-steps 256 --env-backend envpool

How the peers differ from our reference, as of Stable-Baselines3 2.9, SBX 0.28 and rl_games 1.6; flags of the reference
that the peers could not take in the same sense are refused:
- SB3 and SBX step several environments in one process (DummyVecEnv), as our reference does. SBX computes on the CPU,
  whatever --device is; so does SB3's PPO.
- PPO: SBX ignores clip_range_vf (it takes the argument and does not use it), gives policy and value an optimiser and a
  gradient clip each, and initialises only the policy's last layer orthogonally. Both anneal the learning rate from the
  second iteration's on, down to 0 for the last.
- PPO of rl_games takes the flags of our fast variant and steps the same environments, on EnvPool too; the step that
  only resets counts as one of play to it, and of the next episode's length. It compiles its model, as it does by
  default. It normalises returns where ours does rewards, and advantages over the whole rollout; its minibatches are
  the same in every epoch, not drawn. Actions are clipped to [-1, 1] and scaled to their bounds. Where time runs out it
  adds the discounted value of the state that the last step began in. Layers begin as PyTorch's do.
- PPO on Atari: SB3 only, on our environments over EnvPool; the step that only resets counts as one of play to it.
- SAC, TD3 and DQN: their replays keep observations in the environment's type, float64 for MuJoCo, ours in float32. A
  round is a whole number of steps and of updates, so that 4 environments with updates_per_step 0.1 have 2 updates
  after every 5 steps, ours one after every second or third; a run ends after a whole round.
- SAC: SB3 has one learning rate, here policy_lr; SBX has q_lr for the critics, but policy_lr for the entropy
  coefficient, which in ours learns with q_lr. Both train the actor in every update; ours in every policy_frequency-th
  that many times, so as often. Their loss of the entropy coefficient is -log(alpha) * (log_pi + target) on the actions
  that trained the actor, ours -alpha * (log_pi + target) on actions sampled anew, one more pass through the actor.
  They count half the squared error of the critics (a factor that Adam divides out), and clip log_std to [-20, 2] where
  ours squashes it into [-5, 2].
- TD3: SBX moves the targets in every update, SB3 and ours in every policy_frequency-th. SBX trains the actor on the
  lower of both critics, SB3 and ours on the first; SBX counts half the squared error. Both add the exploration noise
  to the random actions before learning_starts too.
- DQN: SBX's hidden layers are 120 and 120 (it reads the first number only), SB3's and ours 120 and 84. Both take the
  Huber loss, ours the squared error. Before learning_starts they act at random, ours epsilon-greedily; with several
  environments they toss one coin for all. SB3 computes the gradient's norm, to clip it at infinity.
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
"""Rounds of updates of an off-policy peer before its clock starts: JAX compiles in the first few."""


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
        # Adam's eps is 1e-5 in both without being asked.
        policy_kwargs={**network, "ortho_init": True},
        seed=args.seed,
        device=device,
    )


def rl_games_ppo(args, module: str, envs) -> Any:
    """rl_games' Runner of its PPO: its configuration of HalfCheetah, with our hyperparameters and network."""
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
    """When a peer's algorithm learns; all but the last in environment steps."""

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
    """Updates in each round over steps of the vector of environments in it, the reference's updates_per_step."""
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
    """As of all off-policy algorithms."""
    for name, only in (("target_network_frequency", 1), ("policy_updates", None)):
        if (value := getattr(args, name)) != only:
            raise bad(name, value, f"the peers only have {only}; leave it out")
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
    """As many environments as the reference has, stepped in this process; UsageError where it would refuse them."""
    from stable_baselines3.common.env_util import make_vec_env

    probe = make_envs(args.env_id, 1, args.seed)
    require_actions(probe, args.env_id)
    probe.close()
    return make_vec_env(lambda: make_env(args.env_id), args.num_envs, seed=args.seed)


continuous_envs = partial(plain_envs, require_actions=require_continuous_actions)
discrete_envs = partial(plain_envs, require_actions=require_discrete_actions)


def normalized_envs(args) -> Any:
    """The peers' counterpart of our PPO's wrappers; the clipping of actions is in their algorithms."""
    from stable_baselines3.common.vec_env import VecNormalize

    return VecNormalize(
        continuous_envs(args), norm_obs=True, norm_reward=True, clip_obs=10.0, clip_reward=10.0, gamma=args.gamma
    )


def rl_games_envs(args) -> Any:
    """Our environments as rl_games' vectorised ones; their own autoreset, so a step that only resets counts as play."""
    from rl_games.common.ivecenv import IVecEnv

    envs = make_envs(args.env_id, args.num_envs, args.seed, args.env_backend)
    require_continuous_actions(envs, args.env_id)

    class Envs(IVecEnv):
        """What rl_games asks of environments."""

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
    """Our Atari environments as SB3's VecEnv; their own autoreset, so a step that only resets counts as play."""
    from stable_baselines3.common.vec_env import VecEnv

    envs = make_atari_envs(args.env_id, args.num_envs, args.seed, CLEANRL)

    class AtariVecEnv(VecEnv):
        """Also the Monitors that the callback asks for: returns and lengths of the whole games of each environment."""

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
            # SB3 bootstraps from the last observation where time ran out.
            infos: list[dict] = [{} for _ in range(self.num_envs)]
            for i in np.flatnonzero(dones):
                ran_out = bool(truncations[i] and not terminations[i])
                infos[i] = {"TimeLimit.truncated": ran_out, "terminal_observation": obs[i]}
            return obs, rewards, dones, infos

        def get_attr(self, attr_name: str, indices=None) -> list:
            return self.ended.get(attr_name) or [None] * self.num_envs

        def env_is_wrapped(self, wrapper_class, indices=None) -> list[bool]:
            # As Monitor is, whose part this plays.
            return [wrapper_class.__name__ == "Monitor"] * self.num_envs

    return AtariVecEnv()


# ------------------------------------------------------------------------------------------------------------- LEARNING


def learn(model, run: Run, timing: Timing) -> None:
    """Trains a model of SB3 or SBX to the end of ``run``; logs every ``timing.log_every`` steps after the warm-up."""
    from stable_baselines3.common.callbacks import BaseCallback

    class Recorder(BaseCallback):
        """Keeps ``run`` up to date."""

        def _on_training_start(self) -> None:
            self.episodes_seen = [0] * self.training_env.num_envs
            self.next_stop = timing.warmup_steps
            # Started again after the warm-up; a run interrupted before that has a speed too.
            run.start_clock()

        def _on_rollout_start(self) -> None:
            # The round before this one is done, its updates included. Off-policy, a round may be one step: be brief.
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
            if not self.is_stopped:  # a step into the next round, which does not count
                self.update()
                run.log({})

        def update(self) -> None:
            run.global_step = self.num_timesteps
            run.optimizer_steps = self.model._n_updates * timing.update_steps
            # Read from the environments' Monitors now and then: that costs the peer nothing in its steps.
            returns, lengths = (self.training_env.get_attr(f"episode_{name}") for name in ("returns", "lengths"))
            for i, seen in enumerate(self.episodes_seen):
                run.record_episodes(returns[i][seen:], lengths[i][seen:])
                self.episodes_seen[i] = len(returns[i])

    run.model = partial(pickled, sb3_actions, model.policy, model.get_vec_normalize_env())
    model.learn(run.total_steps, callback=Recorder())


def learn_rl_games(runner, run: Run, timing: Timing) -> None:
    """Trains what an rl_games Runner is set up for to the end of ``run``; logs every iteration after the first."""
    from rl_games.common.algo_observer import AlgoObserver

    config = runner.params["config"]

    class Recorder(AlgoObserver):
        """Keeps ``run`` up to date."""

        def after_init(self, algo) -> None:
            self.algo = algo
            run.model = self.snapshot

        def snapshot(self) -> dict:
            # TorchScript's module of the moments cannot be pickled.
            model, space = self.algo.model, self.algo.env_info["action_space"]
            return pickled(rl_games_actions, model.a2c_network, model.running_mean_std.state_dict(), space)

        def process_infos(self, infos: dict, done_indices: torch.Tensor) -> None:
            # Before it forgets the episodes that have ended.
            if len(done_indices):
                counts = self.algo.current_rewards, self.algo.current_lengths
                run.record_episodes(*(count[done_indices].flatten().tolist() for count in counts))

        def after_print_stats(self, frame: int, epoch_num: int, total_time: float) -> None:
            # At the end of an iteration, its updates included.
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
    # Started again after the warm-up; a run interrupted before that has a speed too.
    run.start_clock()
    runner.run_train({})


# ------------------------------------------------------------------------------------------------------------- PLAYING


def pickled(actions: Callable, *of) -> dict:
    """What a peer keeps of its policy: ``actions(*of, obs)``."""
    return {"policy": cloudpickle.dumps(partial(actions, *of))}


def load_policy(model: dict, envs) -> Callable[[np.ndarray], np.ndarray]:
    """The policy of a snapshot, as the scripts' functions of this name."""
    return cloudpickle.loads(model["policy"])


def sb3_actions(policy, normalizer, obs: np.ndarray) -> np.ndarray:
    """The best actions of a policy of SB3 or SBX; sampled ones on Atari, as ours."""
    if normalizer is not None:
        obs = normalizer.normalize_obs(obs)
    return policy.predict(obs, deterministic=obs.ndim == 2)[0]


@torch.no_grad()
def rl_games_actions(network, moments: dict, space, obs: np.ndarray) -> np.ndarray:
    """The means of a policy of rl_games; observations are normalised and actions scaled as by its player."""
    from rl_games.algos_torch.players import rescale_actions

    deviation = (moments["running_var"] + 1e-5).sqrt()
    normalized = ((torch.as_tensor(obs) - moments["running_mean"]) / deviation).clamp(-5.0, 5.0)
    means, *_ = network.eval()({"obs": normalized.float()})
    return rescale_actions(*map(torch.as_tensor, (space.low, space.high)), means.clamp(-1.0, 1.0)).numpy()


# --------------------------------------------------------------------------------------------------------------- PEERS


class Peer(NamedTuple):
    """A library's algorithm."""

    module: str
    """of the library, to import"""
    script: str
    """ours of the algorithm, whose flags it takes: the eager reference, or for --env-backend the fast variant"""
    make_model: Callable
    """(the script's arguments, module, environments) -> the library's algorithm"""
    make_envs: Callable
    timing: Callable[[Any], Timing]
    """UsageError for arguments that the library could not take in the same sense"""
    learn: Callable = learn
    """(what ``make_model`` returns, run, timing)"""


def peers_of(name: str, module: str) -> dict[str, Peer]:
    """What both SB3 and SBX have."""
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
"""Whose versions are recorded, by module."""


def install(peer: Peer) -> str:
    """The command that installs the peer's library."""
    return pip_command("rl_games", "--no-deps") if peer.module == "rl_games" else pip_command("peers")


def plan(name: str, args) -> tuple[Timing, int]:
    """When a peer learns with our reference's arguments, which that has validated, and at which step it ends.

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
        args.num_threads = None  # the library's own choice, whatever is our script's
    reference.validate(args)
    timing, total_steps = plan(name, args)
    # Before jax is imported, which reads these variables. SBX does not look at its argument `device`.
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    if args.num_threads is not None:
        torch.set_num_threads(args.num_threads)
    if args.num_threads == 1:
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_cpu_multi_thread_eigen=false"
    envs = peer.make_envs(args)
    model = peer.make_model(args, peer.module, envs)
    device = torch.device("cpu") if peer.module == "sbx" else model.device
    with Run(args, f"{name.partition(':')[0]}.py", device, total_steps) as run:
        peer.learn(model, run, timing)
        run.model = None  # what `finish` would say of it is true of our scripts only
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
