"""Proximal Policy Optimization (PPO) on Atari games over EnvPool, made fast with torch.compile and CUDA graphs.

The same algorithm and numbers as ppo_atari_envpool.py (read that first; a diff of the two is the documentation of what
was made fast). ``--compile`` and ``--cudagraphs`` switch each lever by itself.

    python leanrl/ppo_atari_envpool_torchcompile.py --env-id Breakout-v5 --compile
    python leanrl/ppo_atari_envpool_torchcompile.py --env-id Pong-v5 --compile --amp bf16
    python leanrl/ppo_atari_envpool_torchcompile.py --compile --cudagraphs --num-env-groups 2   # on a CUDA device

What is different (``python -m leanrl.tools.ablate --rows atari`` measures what most of them are worth):
- frames are kept as blocks of 4 x 4 pixels, which are made once: the first convolution then is one of 2 x 2 blocks; its
  weights do the scaling by 255;
- parameters and activations are channels last throughout, so that nothing is rearranged in an update;
- a step of the environment costs one call: write to the rollout, act, with random numbers drawn before; with
  ``--num-env-groups 2`` half of the environments play while the others' actions are computed;
- a minibatch costs one call: gather, loss, gradient by torch.func, clipping and Adam over one flat vector; GAE is a
  scan;
- what an update frees on the CPU stays with the process, instead of being asked for again page by page.

Measured speed and learning curves: doc/benchmarks/ppo_atari_envpool.md
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

import gymnasium as gym
import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

from leanrl.support.atari import CLEANRL, make_atari_envs, whole_games
from leanrl.support.checkpoints import resumed_step
from leanrl.support.cli import RunArgs, run_script
from leanrl.support.devices import available_cores, keep_freed_memory, resolve_device, set_cpu_numerics
from leanrl.support.episodes import EpisodeStatistics
from leanrl.support.errors import bad, require_at_least, require_positive, require_unit_interval
from leanrl.support.evaluation import require_video
from leanrl.support.executables import WARMUP_CALLS, make_executable, untouched
from leanrl.support.optim import FlatAdam, clip_grad_norm
from leanrl.support.run import Run, seed_everything
from leanrl.support.scan import linear_recurrence

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
    """CPU threads of the update; by default all cores. Acting uses 1."""
    compile: bool = False
    """compile the policy step and the update with torch.compile"""
    cudagraphs: bool = False
    """replay the policy step and the update as CUDA graphs (tensordict's CudaGraphModule)"""
    num_env_groups: int = 1
    """pools of environments that are stepped in turn: one plays while another's actions are computed"""

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
    require_at_least(args, 1, "num_threads", "num_env_groups", "checkpoint_every")
    require_at_least(args, 0, "seed", "clip_coef", "ent_coef", "vf_coef", "target_kl")
    require_positive(args, "learning_rate", "max_grad_norm")
    require_unit_interval(args, "gamma", "gae_lambda")
    if args.num_envs % args.num_env_groups:
        raise bad("num_env_groups", args.num_env_groups, f"must divide num_envs = {args.num_envs}")
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


class Conv(nn.Module):
    """A convolution of images [B, H, W, C]. Its kernels are kept as [out, H, W, in], as they are used."""

    def __init__(self, kernels: torch.Tensor, bias: nn.Parameter, stride: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(kernels.detach().contiguous())
        self.bias = bias
        self.stride = stride

    def forward(self, images: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        """The convolution of ``scale * images``. The kernels are scaled: they are fewer numbers."""
        kernels = (self.weight * scale if scale != 1.0 else self.weight).permute(0, 3, 1, 2)
        return F.conv2d(images.permute(0, 3, 1, 2), kernels, self.bias, self.stride).permute(0, 2, 3, 1)


def blocks_of_4(images: torch.Tensor) -> torch.Tensor:
    """[B, C, H, W] -> [B, H / 4, W / 4, C * 4 * 4]: blocks of 4 x 4 pixels, of which each number is a channel."""
    batch, channels, height, width = images.shape
    blocks = images.view(batch, channels, height // 4, 4, width // 4, 4).permute(0, 2, 4, 1, 3, 5)
    return blocks.reshape(batch, height // 4, width // 4, channels * 16)


class Agent(nn.Module):
    """The network of https://doi.org/10.1038/nature14236, shared by a policy's and a value's head.

    From one seed it computes what the reference's does, but keeps its parameters in the order in which they are used.
    """

    def __init__(self, num_actions: int) -> None:
        super().__init__()
        first, second, third = (
            layer_init(nn.Conv2d(4, 32, 8, stride=4)),
            layer_init(nn.Conv2d(32, 64, 4, stride=2)),
            layer_init(nn.Conv2d(64, 64, 3, stride=1)),
        )
        # Of blocks, a kernel of 8 x 8 pixels has 2 x 2, and a stride of 4 pixels is one of 1.
        self.conv1 = Conv(blocks_of_4(first.weight), first.bias, stride=1)
        self.conv2 = Conv(second.weight.permute(0, 2, 3, 1), second.bias, stride=2)
        self.conv3 = Conv(third.weight.permute(0, 2, 3, 1), third.bias, stride=1)
        self.linear = layer_init(nn.Linear(64 * 7 * 7, 512))
        self.linear.weight.data = self.linear.weight.data.view(512, 64, 49).mT.reshape(512, -1)
        self.actor = layer_init(nn.Linear(512, num_actions), std=0.01)
        self.critic = layer_init(nn.Linear(512, 1), std=1.0)

    @staticmethod
    def pack(obs: torch.Tensor) -> torch.Tensor:
        """Observations uint8 [B, 4, 84, 84], as they are kept: [B, 21, 21, 64]"""
        # Four pixels of a row are one number here, a quarter as many to move.
        rows = obs.view(torch.int32).view(-1, 4, 21, 4, 21).permute(0, 2, 4, 1, 3)
        return rows.reshape(-1, 21, 21, 16).view(torch.uint8)

    def forward(self, obs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Packed uint8 [B, 21, 21, 64] -> logits of the actions [B, num_actions], value [B]"""
        hidden = F.relu(self.conv1(obs.float(), scale=1 / 255))
        hidden = F.relu(self.conv3(F.relu(self.conv2(hidden))))
        hidden = F.relu(self.linear(hidden.flatten(1)))
        # A value in bf16 would have three digits.
        with torch.autocast(obs.device.type, enabled=False):
            hidden = hidden.float()
            return self.actor(hidden), self.critic(hidden).squeeze(-1)


# ----------------------------------------------------------------------------------------------------------- ROLLOUT


@dataclass
class Rollout:
    """T steps of N environments, allocated once on the learner's device, so that graphs may hold their addresses.

    The environments stand in G groups of n. Rows are the steps of the groups in the order in which they are acted
    upon, row t * G + g; all but the last G are learned from, those hold what the last step led to.
    """

    obs: torch.Tensor  # [(T + 1) * G, n, ...] packed
    noise: torch.Tensor  # [(T + 1) * G, n, num_actions] Gumbel's, drawn before the rollout
    actions: torch.Tensor  # [(T + 1) * G, n] int64
    logprobs: torch.Tensor  # [(T + 1) * G, n]
    values: torch.Tensor  # [(T + 1) * G, n]
    advantages: torch.Tensor  # [T, N], like the two below
    returns: torch.Tensor
    weights: torch.Tensor  # 0 where a step only reset its environment
    row: torch.Tensor  # [1] where the next action goes

    @classmethod
    def allocate(cls, packed_obs: torch.Tensor, num_actions: int, args: Args) -> "Rollout":
        """For observations like ``packed_obs`` [n, ...]."""
        rows, num_envs = (args.num_steps + 1) * args.num_env_groups, len(packed_obs)

        def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=packed_obs.device)

        return cls(
            obs=zeros(rows, *packed_obs.shape, dtype=packed_obs.dtype),
            noise=zeros(rows, num_envs, num_actions),
            actions=zeros(rows, num_envs, dtype=torch.int64),
            logprobs=zeros(rows, num_envs),
            values=zeros(rows, num_envs),
            advantages=zeros(args.num_steps, args.num_envs),
            returns=zeros(args.num_steps, args.num_envs),
            weights=zeros(args.num_steps, args.num_envs),
            row=zeros(1, dtype=torch.int64),
        )

    def minibatch(self, inds: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Rows ``inds`` of obs, actions, logprobs, advantages, returns, values, weights; steps and envs flattened."""
        columns = (self.actions, self.logprobs, self.advantages, self.returns, self.values, self.weights)
        return tuple(column.flatten(0, 1)[inds] for column in (self.obs, *columns))


# ------------------------------------------------------------------------------------------------ TARGETS AND LOSSES


def compute_gae(
    rewards: torch.Tensor,
    values: torch.Tensor,
    terminations: torch.Tensor,
    dones: torch.Tensor,
    gamma: float,
    gae_lambda: float,
) -> torch.Tensor:
    """Generalised advantage estimation (https://arxiv.org/abs/1506.02438, equation 16), as a scan backwards in time.

    Arguments and result as in ppo_atari_envpool.py.
    """
    deltas = rewards + gamma * values[1:] * (1.0 - terminations) - values[:-1]
    decays = gamma * gae_lambda * (1.0 - dones)
    return linear_recurrence(deltas.flip(0), decays.flip(0)).flip(0)


def finish_rollout(
    rollout: Rollout,
    rewards: torch.Tensor,
    terminations: torch.Tensor,
    dones: torch.Tensor,
    resets: torch.Tensor,
    args: Args,
) -> None:
    """Fills the rollout's advantages, returns and weights.

    Args:
        rewards, terminations, dones, resets: [T, N]; flags as floats.
    """
    values = rollout.values.view(-1, args.num_envs)
    advantages = compute_gae(rewards, values, terminations, dones, args.gamma, args.gae_lambda)
    rollout.weights.copy_(1.0 - resets)
    rollout.advantages.copy_(advantages)
    rollout.returns.copy_(advantages + values[:-1])


def weighted_mean(x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Mean of ``x`` over the rows that count (weight 1)."""
    return (x * weights).sum() / weights.sum().clamp(min=1.0)


def ppo_loss(
    logits: torch.Tensor,
    newvalue: torch.Tensor,
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
        logits, newvalue: what the agent says now, [B, num_actions] and [B].
        actions and the others: [B]. ``weights`` is 0 for steps that only reset an environment, else 1.

    Returns:
        the loss, and [6]: policy loss, value loss, entropy, old_approx_kl, approx_kl, clipfrac (detached).
    """
    all_logprobs = F.log_softmax(logits, 1)
    newlogprob = all_logprobs.gather(1, actions.unsqueeze(1)).squeeze(1)
    entropy = -(all_logprobs.exp() * all_logprobs).sum(1)
    logratio = newlogprob - logprobs
    ratio = logratio.exp()

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


def make_update(agent: Agent, optimizer: FlatAdam, rollout: Rollout, args: Args) -> Callable:
    """The function ``update(mb_inds) -> parts`` that takes one gradient step, as one graph."""
    device_type = optimizer.params.device.type

    def update(mb_inds: torch.Tensor) -> torch.Tensor:
        obs, *rest = rollout.minibatch(mb_inds)

        def loss_fn(params: dict[str, torch.Tensor]):
            with torch.autocast(device_type, torch.bfloat16, enabled=args.amp == "bf16"):
                outputs = torch.func.functional_call(agent, params, (obs,))
                return ppo_loss(*outputs, *rest, args)

        # torch.func instead of .backward(), which breaks the graph in three.
        grads, parts = torch.func.grad(loss_fn, has_aux=True)(optimizer.unflatten(optimizer.params))
        optimizer.step(clip_grad_norm(optimizer.flatten(grads), args.max_grad_norm))
        return parts

    return update


# ------------------------------------------------------------------------------------------------------------ ACTING


def make_policy_step(agent: Agent, rollout: Rollout, args: Args) -> tuple[Callable, Callable]:
    """The functions that act.

    Returns:
        ``policy_step(obs)``: [n, ...] -> actions [n] of one group, whose step it writes to the rollout's next row;
        ``start()``: to be called before each rollout, takes the learner's parameters and draws the noise.
    """
    device_type = rollout.obs.device.type
    rounded = {}
    if args.amp == "bf16":
        # Matrices are rounded once per rollout, which autocast would do at every step.
        rounded = {n: p.detach().bfloat16() for n, p in agent.named_parameters() if n == "linear.weight"}

    def start() -> None:
        for name, copy in rounded.items():
            copy.copy_(agent.get_parameter(name))
        rollout.noise.exponential_().log_().neg_()
        rollout.row.zero_()

    def policy_step(obs: torch.Tensor) -> torch.Tensor:
        packed = agent.pack(obs)
        with torch.autocast(device_type, torch.bfloat16, enabled=args.amp == "bf16"):
            logits, value = torch.func.functional_call(agent, rounded, (packed,))
        # A sample of the softmax: https://en.wikipedia.org/wiki/Gumbel_distribution#Gumbel_reparameterization_tricks
        actions = (logits + rollout.noise.index_select(0, rollout.row).squeeze(0)).argmax(1)
        logprobs = F.log_softmax(logits, 1).gather(1, actions.unsqueeze(1)).squeeze(1)
        for column, step in (
            (rollout.obs, packed),
            (rollout.actions, actions),
            (rollout.logprobs, logprobs),
            (rollout.values, value),
        ):
            column.index_copy_(0, rollout.row, step.unsqueeze(0))
        rollout.row.add_(1)
        return actions

    return policy_step, start


def load_policy(model: dict, envs: gym.vector.VectorEnv) -> Callable[[np.ndarray], np.ndarray]:
    """The policy of a saved model: observations uint8 [N, 4, 84, 84] -> actions [N], sampled as in training.

    The likeliest action alone can stay for ever where it does nothing, say before Breakout's next ball.
    """
    agent = Agent(int(envs.single_action_space.n))
    agent.load_state_dict(model["agent"])
    generator = torch.Generator().manual_seed(0)

    @torch.no_grad()
    def policy(obs: np.ndarray) -> np.ndarray:
        logits, _ = agent(agent.pack(torch.as_tensor(obs)))
        return torch.multinomial(F.softmax(logits, 1), 1, generator=generator).squeeze(1).numpy()

    return policy


# ------------------------------------------------------------------------------------------------------- EXECUTABLES


def make_executables(policy_step: Callable, update: Callable, args: Args, device: torch.device) -> tuple[Callable, ...]:
    """``policy_step`` and ``update``, compiled and captured as the flags say, with what moves their inputs around them.

    Returns:
        ``act(obs)``: a pool's observations [n, ...] -> actions [n], both NumPy's arrays;
        ``train_epoch(b_inds)``: one update for each minibatch of the rows ``b_inds``; returns the last one's parts.
    """
    executable = partial(make_executable, device=device, compile=args.compile, cudagraphs=args.cudagraphs)
    policy_step, update = executable(policy_step), executable(update)

    def act(obs: np.ndarray) -> np.ndarray:
        return policy_step(torch.from_numpy(obs).to(device)).cpu().numpy()

    return act, partial(each_minibatch, update, args)


def each_minibatch(update: Callable, args: Args, b_inds: torch.Tensor) -> torch.Tensor:
    """Calls ``update`` on the minibatches of ``b_inds``, one after the other; returns the last one's parts."""
    for mb_inds in b_inds.split(args.num_envs * args.num_steps // args.num_minibatches):
        parts = update(mb_inds)
    return parts


# -------------------------------------------------------------------------------------------------------------- MAIN


@torch.no_grad()
def main(args: Args, make_executables: Callable = make_executables, script_file: str = __file__) -> None:
    validate(args)
    device = resolve_device(args)
    num_threads = args.num_threads or available_cores()
    set_cpu_numerics(num_threads)
    if device.type == "cpu":
        keep_freed_memory()
    batch_size = args.num_envs * args.num_steps
    num_iterations = args.total_timesteps // batch_size
    group_size = args.num_envs // args.num_env_groups
    groups = [slice(first, first + group_size) for first in range(0, args.num_envs, group_size)]
    start = resumed_step(args.resume)
    pools = [
        make_atari_envs(args.env_id, group_size, args.seed, PROTOCOL, start=start, first_index=group.start)
        for group in groups
    ]
    if args.capture_video:
        require_video(args.env_id, "envpool")
    num_actions = int(pools[0].single_action_space.n)

    seed_everything(args.seed)
    agent = Agent(num_actions).to(device)
    optimizer = FlatAdam(agent, lr=args.learning_rate, eps=1e-5)
    next_obs = [pool.reset()[0] for pool in pools]
    rollout = Rollout.allocate(agent.pack(torch.from_numpy(next_obs[0]).to(device)), num_actions, args)
    policy_step, start_rollout = make_policy_step(agent, rollout, args)
    update = make_update(agent, optimizer, rollout, args)
    act, train_epoch = make_executables(policy_step, update, args, device)
    games = EpisodeStatistics(args.num_envs)

    def state_dict() -> dict:
        return {"agent": agent.state_dict(), "optimizer": optimizer.state_dict()}

    with Run(args, script_file, device, total_steps=num_iterations * batch_size) as run:
        if run.resumed is not None:
            agent.load_state_dict(run.resumed["agent"])
            optimizer.load_state_dict(run.resumed["optimizer"])

        with run.warmup(), untouched([*optimizer.tensors(), rollout.row], device):
            # TorchInductor builds the number of threads into a CPU's kernels, so each is compiled with its own.
            for _ in range(WARMUP_CALLS if args.cudagraphs else 1):
                rollout.row.zero_()
                torch.set_num_threads(1)
                act(next_obs[0])
                torch.set_num_threads(num_threads)
                train_epoch(torch.arange(batch_size, device=device))

        # What the environments return, on the CPU until the end of the rollout.
        shape = args.num_steps, args.num_envs
        rewards, scores = np.zeros(shape, np.float32), np.zeros(shape)
        terminations, dones, game_ends = np.zeros((3, *shape), bool)
        last_dones = np.zeros(args.num_envs, bool)
        run.restore_rng()
        run.start_clock()
        for iteration in range(run.global_step // batch_size + 1, num_iterations + 1):
            if run.stop_requested:
                break
            if args.anneal_lr:
                frac = 1.0 - (iteration - 1.0) / num_iterations
                optimizer.lr.fill_(frac * args.learning_rate)

            # A second thread of PyTorch's would wait for work by spinning, on a core that the environments need.
            torch.set_num_threads(1)
            start_rollout()
            for pool, obs in zip(pools, next_obs, strict=True):
                pool.send(act(obs))
            for step in range(args.num_steps):
                for i, (pool, group) in enumerate(zip(pools, groups, strict=True)):
                    next_obs[i], reward, terminated, truncated, infos = pool.recv()
                    done = terminated | truncated
                    rewards[step, group], terminations[step, group], dones[step, group] = reward, terminated, done
                    scores[step, group], game_ends[step, group] = whole_games(reward, done, infos)
                    actions = act(next_obs[i])
                    # The last observation of the rollout is valued now, and acted upon after the update.
                    if step < args.num_steps - 1:
                        pool.send(actions)
            torch.set_num_threads(num_threads)
            run.global_step += batch_size

            resets = np.concatenate([last_dones[None], dones[:-1]])
            last_dones = dones[-1].copy()
            # A lost life ends the episode that is learned from; what is reported are whole games.
            run.record_episodes(*games.add(scores, game_ends, resets))
            outcome = (torch.from_numpy(x).to(device, torch.float32) for x in (rewards, terminations, dones, resets))
            finish_rollout(rollout, *outcome, args)

            for _ in range(args.update_epochs):
                parts = train_epoch(torch.randperm(batch_size, device=device))
                run.optimizer_steps += args.num_minibatches
                if args.target_kl is not None and parts[LOSS_NAMES.index("approx_kl")] > args.target_kl:
                    break

            live = rollout.weights > 0
            y_true, y_pred = rollout.returns[live], rollout.values.view(-1, args.num_envs)[:-1][live]
            explained_variance = 1 - (y_true - y_pred).var() / y_true.var()
            losses = {f"losses/{name}": value for name, value in zip(LOSS_NAMES, parts.tolist(), strict=True)}
            losses["losses/explained_variance"] = explained_variance.item()
            run.log({"charts/learning_rate": optimizer.lr.item(), **losses})
            if run.checkpoint_due():
                run.checkpoint(state_dict())

        run.finish(state_dict(), model={"agent": agent.state_dict()})
    for pool in pools:
        pool.close()


if __name__ == "__main__":
    run_script(main, Args, __file__)
