"""Proximal Policy Optimization (PPO) on Atari games over EnvPool: the readable eager reference.

Paper: https://arxiv.org/abs/1707.06347. Algorithm, names, hyperparameters and structure follow CleanRL's
https://docs.cleanrl.dev/rl-algorithms/ppo/#ppo_atari_envpoolpy; what differs: games that run out of time are
bootstrapped from their true last observation, and steps that only reset an environment are left out of the loss.
Its fast sibling, which computes the same numbers, is ppo_atari_envpool_torchcompile.py.

    python leanrl/ppo_atari_envpool.py --env-id Breakout-v5
    python leanrl/ppo_atari_envpool.py --env-id Pong-v5 --seed 2 --save-model --capture-video

Measured speed and learning curves: doc/benchmarks/ppo_atari_envpool.md
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import gymnasium as gym
import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributions.categorical import Categorical

from leanrl.support.atari import CLEANRL, make_atari_envs, whole_games
from leanrl.support.checkpoints import resumed_step
from leanrl.support.cli import RunArgs, run_script
from leanrl.support.devices import available_cores, resolve_device, set_cpu_numerics
from leanrl.support.episodes import EpisodeStatistics
from leanrl.support.errors import bad, require_at_least, require_positive, require_unit_interval
from leanrl.support.evaluation import require_video
from leanrl.support.run import Run, seed_everything

PROTOCOL = CLEANRL


@dataclass
class Args(RunArgs):
    env_id: str = "Breakout-v5"
    """Atari game, as EnvPool names it"""
    total_timesteps: int = 10_000_000
    """environment steps of the whole run, of 4 frames each"""
    seed: int = 1
    """seed of the environments, the network and the exploration"""
    device: str = "auto"
    """auto, cpu, cuda or cuda:N"""
    amp: Literal["none", "bf16"] = "none"
    """bf16 runs the network under autocast, its two heads left out"""
    num_threads: int | None = None
    """CPU threads of PyTorch; by default all cores"""

    learning_rate: float = 2.5e-4
    """learning rate of Adam"""
    num_envs: int = 8
    """environments stepped together"""
    num_steps: int = 128
    """steps of each environment in a rollout"""
    anneal_lr: bool = True
    """let the learning rate fall linearly to 0"""
    gamma: float = 0.99
    """discount"""
    gae_lambda: float = 0.95
    """lambda of generalised advantage estimation"""
    num_minibatches: int = 4
    """minibatches per epoch"""
    update_epochs: int = 4
    """passes over each rollout"""
    norm_adv: bool = True
    """normalise the advantages of each minibatch"""
    clip_coef: float = 0.1
    """clip range of the probability ratio"""
    clip_vloss: bool = True
    """clip the value loss too"""
    ent_coef: float = 0.01
    """coefficient of the entropy bonus"""
    vf_coef: float = 0.5
    """coefficient of the value loss"""
    max_grad_norm: float = 0.5
    """gradients are clipped to this norm"""
    target_kl: float | None = None
    """stop the epochs of an update once the approximate KL divergence exceeds this"""


def validate(args: Args) -> None:
    """Raises UsageError on the first argument that cannot work."""
    require_at_least(args, 1, "total_timesteps", "num_envs", "num_steps", "num_minibatches", "update_epochs")
    require_at_least(args, 1, "num_threads", "checkpoint_every")
    require_at_least(args, 0, "seed", "clip_coef", "ent_coef", "vf_coef", "target_kl")
    require_positive(args, "learning_rate", "max_grad_norm")
    require_unit_interval(args, "gamma", "gae_lambda")
    batch_size = args.num_envs * args.num_steps
    if batch_size % args.num_minibatches:
        raise bad("num_minibatches", args.num_minibatches, f"must divide num_envs * num_steps = {batch_size}")
    if args.norm_adv and batch_size // args.num_minibatches < 2:
        raise bad("num_minibatches", args.num_minibatches, "leaves minibatches of 1, which --norm-adv cannot normalise")
    if args.total_timesteps < batch_size:
        raise bad("total_timesteps", args.total_timesteps, f"is less than one rollout, {batch_size} steps")


# ---------------------------------------------------------------------------------------------------------- NETWORKS


def layer_init(layer: nn.Module, std: float = np.sqrt(2), bias_const: float = 0.0) -> nn.Module:
    nn.init.orthogonal_(layer.weight, std)
    nn.init.constant_(layer.bias, bias_const)
    return layer


class Agent(nn.Module):
    """The network of https://doi.org/10.1038/nature14236, shared by a policy's and a value's head."""

    def __init__(self, num_actions: int) -> None:
        super().__init__()
        self.network = nn.Sequential(
            layer_init(nn.Conv2d(4, 32, 8, stride=4)),
            nn.ReLU(),
            layer_init(nn.Conv2d(32, 64, 4, stride=2)),
            nn.ReLU(),
            layer_init(nn.Conv2d(64, 64, 3, stride=1)),
            nn.ReLU(),
            nn.Flatten(),
            layer_init(nn.Linear(64 * 7 * 7, 512)),
            nn.ReLU(),
        )
        self.actor = layer_init(nn.Linear(512, num_actions), std=0.01)
        self.critic = layer_init(nn.Linear(512, 1), std=1.0)

    def forward(self, obs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """uint8 [B, 4, 84, 84] -> logits of the actions [B, num_actions], value [B]"""
        hidden = self.network(obs / 255.0)
        # A value in bf16 would have three digits.
        with torch.autocast(obs.device.type, enabled=False):
            hidden = hidden.float()
            return self.actor(hidden), self.critic(hidden).squeeze(-1)

    def get_action_and_value(self, obs: torch.Tensor, action: torch.Tensor | None = None):
        """[B, ...] -> action [B] (sampled unless given), log-probability, entropy, value [B]"""
        logits, value = self(obs)
        probs = Categorical(logits=logits, validate_args=False)
        if action is None:
            action = probs.sample()
        return action, probs.log_prob(action), probs.entropy(), value


# ------------------------------------------------------------------------------------------------ TARGETS AND LOSSES


def compute_gae(
    rewards: torch.Tensor,
    values: torch.Tensor,
    terminations: torch.Tensor,
    dones: torch.Tensor,
    gamma: float,
    gae_lambda: float,
) -> torch.Tensor:
    """Generalised advantage estimation (https://arxiv.org/abs/1506.02438, equation 16).

    ``values[t + 1]`` values the observation that step t led to, the true last one where step t ended an episode: it is
    bootstrapped from unless the episode terminated, and ``dones`` (terminated or truncated) ends the sum. Advantages
    of steps that only reset an environment mean nothing, and reach no other step.

    Args:
        rewards, terminations, dones: [T, N]; the flags as floats.
        values: [T + 1, N].

    Returns:
        advantages [T, N]
    """
    advantages = torch.zeros_like(rewards)
    lastgaelam = torch.zeros_like(rewards[0])
    for t in reversed(range(len(rewards))):
        delta = rewards[t] + gamma * values[t + 1] * (1.0 - terminations[t]) - values[t]
        advantages[t] = lastgaelam = delta + gamma * gae_lambda * (1.0 - dones[t]) * lastgaelam
    return advantages


def weighted_mean(x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Mean of ``x`` over the rows that count (weight 1)."""
    return (x * weights).sum() / weights.sum().clamp(min=1.0)


def ppo_loss(
    agent: Agent,
    obs: torch.Tensor,
    actions: torch.Tensor,
    logprobs: torch.Tensor,
    advantages: torch.Tensor,
    returns: torch.Tensor,
    values: torch.Tensor,
    weights: torch.Tensor,
    args: Args,
) -> tuple[torch.Tensor, torch.Tensor]:
    """PPO's clipped loss over one minibatch.

    Args:
        obs: [B, ...]; the others [B]. ``weights`` is 0 for steps that only reset an environment, else 1.

    Returns:
        the loss, and [6]: policy loss, value loss, entropy, old_approx_kl, approx_kl, clipfrac (detached).
    """
    _, newlogprob, entropy, newvalue = agent.get_action_and_value(obs, actions)
    logratio = newlogprob - logprobs
    ratio = logratio.exp()

    with torch.no_grad():
        # approx_kl: http://joschu.net/blog/kl-approx.html
        old_approx_kl = weighted_mean(-logratio, weights)
        approx_kl = weighted_mean((ratio - 1) - logratio, weights)
        clipfrac = weighted_mean(((ratio - 1.0).abs() > args.clip_coef).float(), weights)

    if args.norm_adv:
        mean = weighted_mean(advantages, weights)
        # Unbiased, as torch.std is.
        variance = (weights * (advantages - mean) ** 2).sum() / (weights.sum() - 1).clamp(min=1.0)
        advantages = (advantages - mean) / (variance.sqrt() + 1e-8)

    pg_loss1 = -advantages * ratio
    pg_loss2 = -advantages * torch.clamp(ratio, 1 - args.clip_coef, 1 + args.clip_coef)
    pg_loss = weighted_mean(torch.max(pg_loss1, pg_loss2), weights)

    v_loss = (newvalue - returns) ** 2
    if args.clip_vloss:
        v_clipped = values + torch.clamp(newvalue - values, -args.clip_coef, args.clip_coef)
        v_loss = torch.max(v_loss, (v_clipped - returns) ** 2)
    v_loss = 0.5 * weighted_mean(v_loss, weights)

    entropy_loss = weighted_mean(entropy, weights)
    loss = pg_loss - args.ent_coef * entropy_loss + args.vf_coef * v_loss
    parts = torch.stack([pg_loss, v_loss, entropy_loss, old_approx_kl, approx_kl, clipfrac])
    return loss, parts.detach()


LOSS_NAMES = ("policy_loss", "value_loss", "entropy", "old_approx_kl", "approx_kl", "clipfrac")


# ------------------------------------------------------------------------------------------------------------ UPDATE


def make_update(agent: Agent, optimizer: torch.optim.Adam, args: Args) -> Callable:
    """The function ``update(minibatch) -> parts`` that takes one gradient step; ``minibatch`` is ppo_loss's tensors."""
    device_type = next(agent.parameters()).device.type

    def update(*minibatch: torch.Tensor) -> torch.Tensor:
        with torch.autocast(device_type, torch.bfloat16, enabled=args.amp == "bf16"):
            loss, parts = ppo_loss(agent, *minibatch, args)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm)
        optimizer.step()
        return parts

    return update


# ------------------------------------------------------------------------------------------------------------ ACTING


def load_policy(model: dict, envs: gym.vector.VectorEnv) -> Callable[[np.ndarray], np.ndarray]:
    """The policy of a saved model: observations uint8 [N, 4, 84, 84] -> actions [N], sampled as in training.

    The likeliest action alone can stay for ever where it does nothing, say before Breakout's next ball.
    """
    agent = Agent(int(envs.single_action_space.n))
    agent.load_state_dict(model["agent"])
    generator = torch.Generator().manual_seed(0)

    @torch.no_grad()
    def policy(obs: np.ndarray) -> np.ndarray:
        logits, _ = agent(torch.as_tensor(obs))
        return torch.multinomial(F.softmax(logits, 1), 1, generator=generator).squeeze(1).numpy()

    return policy


# -------------------------------------------------------------------------------------------------------------- MAIN


def main(args: Args) -> None:
    validate(args)
    device = resolve_device(args)
    set_cpu_numerics(args.num_threads or available_cores())
    batch_size = args.num_envs * args.num_steps
    minibatch_size = batch_size // args.num_minibatches
    num_iterations = args.total_timesteps // batch_size
    envs = make_atari_envs(args.env_id, args.num_envs, args.seed, PROTOCOL, start=resumed_step(args.resume))
    if args.capture_video:
        require_video(args.env_id, "envpool")

    seed_everything(args.seed)
    agent = Agent(int(envs.single_action_space.n)).to(device)
    optimizer = torch.optim.Adam(agent.parameters(), lr=args.learning_rate, eps=1e-5)
    update = make_update(agent, optimizer, args)
    games = EpisodeStatistics(args.num_envs)

    def state_dict() -> dict:
        return {"agent": agent.state_dict(), "optimizer": optimizer.state_dict()}

    with Run(args, __file__, device, total_steps=num_iterations * batch_size) as run:
        if run.resumed is not None:
            agent.load_state_dict(run.resumed["agent"])
            optimizer.load_state_dict(run.resumed["optimizer"])

        next_obs = torch.as_tensor(envs.reset()[0], device=device)
        # Rollout storage. obs and values hold one step more: what the last step led to.
        obs = torch.zeros((args.num_steps + 1,) + next_obs.shape, dtype=next_obs.dtype, device=device)
        actions = torch.zeros((args.num_steps, args.num_envs), dtype=torch.int64, device=device)
        logprobs = torch.zeros((args.num_steps, args.num_envs), device=device)
        rewards = torch.zeros((args.num_steps, args.num_envs), device=device)
        terminations = torch.zeros((args.num_steps, args.num_envs), device=device)
        dones = torch.zeros((args.num_steps, args.num_envs), device=device)
        values = torch.zeros((args.num_steps + 1, args.num_envs), device=device)
        weights = torch.zeros((args.num_steps, args.num_envs), device=device)

        # Where the next step only resets its environment (NEXT_STEP autoreset).
        resets = np.zeros(args.num_envs, bool)
        run.restore_rng()
        run.start_clock()
        first_iteration = run.global_step // batch_size + 1
        for iteration in range(first_iteration, num_iterations + 1):
            if run.stop_requested:
                break
            if args.anneal_lr:
                frac = 1.0 - (iteration - 1.0) / num_iterations
                optimizer.param_groups[0]["lr"] = frac * args.learning_rate

            for step in range(args.num_steps):
                obs[step] = next_obs
                weights[step] = torch.as_tensor(~resets, device=device)
                with torch.no_grad(), torch.autocast(device.type, torch.bfloat16, enabled=args.amp == "bf16"):
                    actions[step], logprobs[step], _, values[step] = agent.get_action_and_value(next_obs)

                next_obs, reward, terminated, truncated, infos = envs.step(actions[step].cpu().numpy())
                next_obs = torch.as_tensor(next_obs, device=device)
                done = terminated | truncated
                rewards[step] = torch.as_tensor(reward, device=device)
                terminations[step] = torch.as_tensor(terminated, device=device)
                dones[step] = torch.as_tensor(done, device=device)
                # A lost life ends the episode that is learned from; what is reported are whole games.
                run.record_episodes(*games.add_step(*whole_games(reward, done, infos), resets))
                resets = done
            obs[args.num_steps] = next_obs
            run.global_step += batch_size

            with torch.no_grad():
                with torch.autocast(device.type, torch.bfloat16, enabled=args.amp == "bf16"):
                    _, values[args.num_steps] = agent(next_obs)
                advantages = compute_gae(rewards, values, terminations, dones, args.gamma, args.gae_lambda)
                returns = advantages + values[:-1]

            batch = (obs[:-1].flatten(0, 1),) + tuple(
                x.flatten() for x in (actions, logprobs, advantages, returns, values[:-1], weights)
            )
            for _ in range(args.update_epochs):
                b_inds = torch.randperm(batch_size, device=device)
                for mb_inds in b_inds.split(minibatch_size):
                    parts = update(*(x[mb_inds] for x in batch))
                    run.optimizer_steps += 1
                if args.target_kl is not None and parts[LOSS_NAMES.index("approx_kl")] > args.target_kl:
                    break
            if iteration == first_iteration < num_iterations:  # a GPU's libraries are set up with the first update
                run.start_clock()

            y_true, y_pred = returns[weights > 0], values[:-1][weights > 0]
            explained_variance = 1 - (y_true - y_pred).var() / y_true.var()
            losses = {f"losses/{name}": value for name, value in zip(LOSS_NAMES, parts.tolist(), strict=True)}
            losses["losses/explained_variance"] = explained_variance.item()
            run.log({"charts/learning_rate": optimizer.param_groups[0]["lr"], **losses})
            if run.checkpoint_due():
                run.checkpoint(state_dict())

        run.finish(state_dict(), model={"agent": agent.state_dict()})
    envs.close()


if __name__ == "__main__":
    run_script(main, Args, __file__)
