"""One run of a peer's algorithm, with the hyperparameters and flags of our eager reference of the same algorithm.

`leanrl.tools.peers` starts it. It leaves a run directory as our scripts do, its speed measured by the same code: the
peer's first iteration, in which JAX compiles, counts as warm-up; the clock stops when the last update is done.

    python -m leanrl.tools.peer_worker sb3 ppo_continuous_action --total-timesteps 20480

How the peers differ from our reference, as of Stable-Baselines3 2.9 and SBX 0.28:
- SBX ignores clip_range_vf (it takes the argument and does not use it), gives policy and value an optimiser and a
  gradient clip each, and initialises only the policy's last layer orthogonally;
- both anneal the learning rate from the second iteration's on, down to 0 for the last;
- both step several environments in one process (DummyVecEnv), as our reference does.
"""

import importlib
import os
import sys
from collections.abc import Callable
from typing import Any

import torch

from leanrl.support.cli import parse_args
from leanrl.support.envs import make_env
from leanrl.support.errors import UsageError, bad
from leanrl.support.run import Run

PEERS = {"sb3": "stable_baselines3", "sbx": "sbx"}
"""The name in tables -> the module to import."""


def ppo_continuous_action(args, peer: str, env) -> Any:
    """The peer's PPO with our reference's hyperparameters."""
    if args.target_kl is not None:
        raise bad("target_kl", args.target_kl, "means something else in each peer; leave it out")
    if args.amp != "none":
        raise bad("amp", args.amp, "the peers have no such mode; leave it out")
    if peer == "sb3":
        activation = torch.nn.Tanh
    else:
        os.environ.setdefault("JAX_PLATFORMS", "cpu")  # SBX does not look at its argument `device`
        from flax.linen import tanh as activation

    return importlib.import_module(PEERS[peer]).PPO(
        "MlpPolicy",
        env,
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
        # Adam's eps is 1e-5 in both without being told.
        policy_kwargs={
            "net_arch": {"pi": [64, 64], "vf": [64, 64]},
            "activation_fn": activation,
            "ortho_init": True,
        },
        seed=args.seed,
        # Small networks: both peers advise against a GPU.
        device="cpu",
    )


ALGORITHMS: dict[str, Callable] = {"ppo_continuous_action": ppo_continuous_action}
"""Our reference -> what builds the peer's algorithm from the reference's arguments and normalised environments."""


def use_threads(num_threads: int | None) -> None:
    """Limits PyTorch and XLA to one thread for 1; None leaves each library its own choice.

    Must run before jax is imported.
    """
    if num_threads is None:
        return
    torch.set_num_threads(num_threads)
    if num_threads == 1:
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_cpu_multi_thread_eigen=false"


def make_normalized_envs(args):
    """The peers' counterpart of our reference's wrappers; the clipping of actions is in their algorithms."""
    from stable_baselines3.common.env_util import make_vec_env
    from stable_baselines3.common.vec_env import VecNormalize

    envs = make_vec_env(lambda: make_env(args.env_id), args.num_envs, seed=args.seed)
    return VecNormalize(envs, norm_obs=True, norm_reward=True, clip_obs=10.0, clip_reward=10.0, gamma=args.gamma)


def learn(model, run: Run, warmup_steps: int, num_minibatches: int) -> None:
    """Trains ``model`` to the end of ``run``, logging to it after every iteration but those of the warm-up."""
    from stable_baselines3.common.callbacks import BaseCallback

    class Recorder(BaseCallback):
        """Keeps ``run`` up to date."""

        def _on_training_start(self) -> None:
            self.episodes_seen = [0] * self.training_env.num_envs
            # Started again after the warm-up; a run interrupted before that has a speed too.
            run.start_clock()

        def _on_step(self) -> bool:
            return not run.stop_requested

        def _on_rollout_start(self) -> None:
            # The iteration before this rollout is done, its update included.
            self.update()
            if self.num_timesteps >= warmup_steps and not run.warmup_seconds:
                run.start_clock()
            elif run.warmup_seconds:
                run.log({})

        def _on_training_end(self) -> None:
            self.update()
            run.log({})

        def update(self) -> None:
            run.global_step = self.num_timesteps
            run.optimizer_steps = self.model._n_updates * num_minibatches
            # Read from the environments' Monitors now and then: that costs the peer nothing in its steps.
            returns, lengths = (self.training_env.get_attr(f"episode_{name}") for name in ("returns", "lengths"))
            for i, seen in enumerate(self.episodes_seen):
                run.record_episodes(returns[i][seen:], lengths[i][seen:])
                self.episodes_seen[i] = len(returns[i])

    model.learn(run.total_steps, callback=Recorder())


def main(peer: str, script: str, argv: list[str]) -> None:
    reference = importlib.import_module(f"leanrl.{script}")
    args = parse_args(reference.Args, script, argv)
    reference.validate(args)
    rollout_steps = args.num_envs * args.num_steps
    total_steps = args.total_timesteps // rollout_steps * rollout_steps
    if total_steps < 2 * rollout_steps:
        raise bad("total_timesteps", args.total_timesteps, f"is less than two rollouts of {rollout_steps} steps")
    use_threads(args.num_threads)
    envs = make_normalized_envs(args)
    model = ALGORITHMS[script](args, peer, envs)
    with Run(args, f"{peer}.py", model.device, total_steps) as run:
        learn(model, run, warmup_steps=rollout_steps, num_minibatches=args.num_minibatches)
        run.finish({})
    envs.close()


if __name__ == "__main__":
    if len(sys.argv) < 3 or sys.argv[1] not in PEERS or sys.argv[2] not in ALGORITHMS:
        sys.exit(f"usage: python -m leanrl.tools.peer_worker {{{','.join(PEERS)}}} {{{','.join(ALGORITHMS)}}} [FLAGS]")
    try:
        main(sys.argv[1], sys.argv[2], sys.argv[3:])
    except UsageError as error:
        print(f"{sys.argv[1]}: {error}", file=sys.stderr)
        raise SystemExit(2) from None
