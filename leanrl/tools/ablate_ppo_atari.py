"""What each trick of the fast PPO on Atari is worth: rows of ``leanrl.tools.ablate``.

At the default hyperparameters, on Breakout-v5; the two sides of a pair must give the same numbers over a few updates or
steps, but for rounding. Rows whose names end in ``bf16`` are those of ``--amp bf16``. All need EnvPool.
"""

import io
import json
import math
import tempfile
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

import leanrl.ppo_atari_envpool as reference
import leanrl.ppo_atari_envpool_torchcompile as fast
from leanrl.support.atari import make_atari_envs
from leanrl.support.devices import available_cores, keep_freed_memory
from leanrl.support.executables import CompiledStep
from leanrl.support.optim import FlatAdam
from leanrl.tools.ablation import (
    CPU,
    Compiler,
    Group,
    Pair,
    Side,
    compiled,
    eager,
    in_pieces,
    pair,
    printed_by_process,
    row_of,
)

ENV_ID, NUM_ACTIONS = "Breakout-v5", 4
NUM_ENVS, NUM_STEPS = fast.Args.num_envs, fast.Args.num_steps
MINIBATCH = NUM_ENVS * NUM_STEPS // fast.Args.num_minibatches
NUM_UPDATES, NUM_POLICY_STEPS = 2, 32
RUN_STEPS = 4 * NUM_ENVS * NUM_STEPS
# Two networks that are the same but for rounding go apart with every step of Adam.
TOLERANCE = 1e-3

ATARI = Group(
    f"PPO on Atari, {ENV_ID}",
    f"An update is one minibatch of {MINIBATCH} rows, GAE is one rollout, all else is one step of {NUM_ENVS}\n"
    "environments, EnvPool's work included where it says playing; training is everything, for each environment step.\n"
    "Freed memory is kept but in the rows about it.",
)


# -------------------------------------------------------------------------------------------------------------- SIDES


def frames(rows: int) -> torch.Tensor:
    """So many observations, smooth as a screen is."""
    coarse = torch.rand(rows, 4, 12, 12, generator=torch.Generator().manual_seed(0))
    return (255 * F.interpolate(coarse, (84, 84), mode="nearest")).to(torch.uint8)


class Parts:
    """What the fast rung's ``main`` makes before its loop, and a finished rollout; the same numbers every time."""

    def __init__(self, agent_type: type = fast.Agent, **changes) -> None:
        keep_freed_memory()
        self.args = args = fast.Args(**changes)
        group = NUM_ENVS // args.num_env_groups
        with torch.no_grad(), torch.random.fork_rng([]):
            torch.manual_seed(1)
            self.agent = agent_type(NUM_ACTIONS)
            self.optimizer = FlatAdam(self.agent, lr=args.learning_rate, eps=1e-5)
            obs = frames((NUM_STEPS + 1) * NUM_ENVS)
            self.obs = obs[:NUM_ENVS]
            self.rollout = rollout = fast.Rollout.allocate(self.agent.pack(obs[:group]), NUM_ACTIONS, args)
            self.policy_step, self.start = fast.make_policy_step(self.agent, rollout, args)
            self.update = fast.make_update(self.agent, self.optimizer, rollout, args)
            rollout.obs.copy_(self.agent.pack(obs).view_as(rollout.obs))
            for column in (rollout.advantages, rollout.returns, rollout.values):
                column.normal_()
            rollout.logprobs.fill_(-math.log(NUM_ACTIONS))
            rollout.actions.random_(0, NUM_ACTIONS)
            rollout.weights.fill_(1.0)
            self.inds = torch.randperm(NUM_STEPS * NUM_ENVS).split(MINIBATCH)


def updates(parts: Parts, step: Callable, outputs: Callable, touched, num_threads: int | None = None) -> Side:
    """NUM_UPDATES updates: ``step(mb_inds)``; ``outputs()`` is what the network says after them."""

    def burst():
        for inds in parts.inds[:NUM_UPDATES]:
            losses = step(inds)
        return losses, outputs()

    steps = NUM_UPDATES * MINIBATCH / parts.args.update_epochs
    return Side(burst, steps, NUM_UPDATES, touched, num_threads or available_cores())


def updating(
    compiler: Compiler | None = None, parts: Parts | None = None, num_threads: int | None = None, **changes
) -> Side:
    """The fast rung's updates."""
    parts = parts or Parts(**changes)
    agent, optimizer = parts.agent, parts.optimizer
    step = (compiler or compiled())(parts.update)
    outputs = partial(lambda obs: agent(agent.pack(obs))[0], parts.obs)
    return updates(parts, step, outputs, optimizer.tensors(), num_threads)


def new_agent(agent_type: type) -> torch.nn.Module:
    with torch.random.fork_rng([]):
        torch.manual_seed(1)
        return agent_type(NUM_ACTIONS)


def reference_updating(channels_last: bool = False, **changes) -> Side:
    """The reference's: ``.backward()`` and ``torch.optim.Adam``, rows gathered as in its loop."""
    parts, agent = Parts(), new_agent(reference.Agent)
    if channels_last:
        agent = agent.to(memory_format=torch.channels_last)
    args = reference.Args(**changes)
    optimizer = torch.optim.Adam(agent.parameters(), lr=args.learning_rate, eps=1e-5)
    update = reference.make_update(agent, optimizer, args)
    rollout = parts.rollout
    columns = (rollout.actions, rollout.logprobs, rollout.advantages, rollout.returns, rollout.values, rollout.weights)
    columns = [column.flatten(0, 1)[: NUM_STEPS * NUM_ENVS] for column in columns]
    batch = [frames((NUM_STEPS + 1) * NUM_ENVS)[: NUM_STEPS * NUM_ENVS], *columns]
    if channels_last:
        batch[0] = batch[0].contiguous(memory_format=torch.channels_last)

    def step(inds: torch.Tensor) -> torch.Tensor:
        return update(*(column[inds] for column in batch))

    return with_adam(updates(parts, step, lambda: agent(parts.obs)[0].detach(), []), agent, optimizer)


def backward_updating() -> Side:
    """The fast rung's network and loss with ``.backward()`` and ``torch.optim.Adam``, compiled in pieces."""
    parts, agent = Parts(), new_agent(fast.Agent)
    optimizer = torch.optim.Adam(agent.parameters(), lr=parts.args.learning_rate, eps=1e-5, fused=True)

    def update(inds: torch.Tensor) -> torch.Tensor:
        obs, *rest = parts.rollout.minibatch(inds)
        loss, losses = fast.ppo_loss(*agent(obs), *rest, parts.args)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(agent.parameters(), parts.args.max_grad_norm)
        optimizer.step()
        return losses

    outputs = partial(lambda obs: agent(agent.pack(obs))[0].detach(), parts.obs)
    return with_adam(updates(parts, in_pieces(update), outputs, []), agent, optimizer)


def with_adam(side: Side, agent: torch.nn.Module, optimizer: torch.optim.Adam) -> Side:
    """``side``, with gradients, and the state of ``optimizer`` put back after a sample."""
    before = [parameter.detach().clone() for parameter in agent.parameters()]
    side.burst = torch.enable_grad()(side.burst)
    # Adam makes its state with the first step, so that what is to be put back is only then known.
    side.burst()
    state = [x for values in optimizer.state.values() for x in values.values()]
    with torch.no_grad():
        for parameter, start in zip(agent.parameters(), before, strict=True):
            parameter.copy_(start)
        for x in state:
            x.zero_()
    side.touched = [*(p.detach() for p in agent.parameters()), *state]
    return side


def acting(compiler: Compiler | None = None, parts: Parts | None = None, num_threads: int = 1, **changes) -> Side:
    """NUM_POLICY_STEPS policy steps of all environments."""
    parts = parts or Parts(**changes)
    rollout = parts.rollout
    step = (compiler or compiled())(parts.policy_step)

    def burst():
        parts.start()
        rollout.noise.zero_()
        for _ in range(NUM_POLICY_STEPS):
            step(parts.obs)
        return rollout.logprobs[:NUM_POLICY_STEPS], rollout.values[:NUM_POLICY_STEPS]

    touched = [rollout.obs, rollout.noise, rollout.actions, rollout.logprobs, rollout.values, rollout.row]
    return Side(burst, NUM_POLICY_STEPS * NUM_ENVS, NUM_POLICY_STEPS, touched, num_threads)


same = partial(pair, tolerance=TOLERANCE)
# In bfloat16 the sides agree to its two or three digits.
roughly = partial(pair, tolerance=0.2)


# ---------------------------------------------------------------------------------------------------------------- ROWS


@row_of(ATARI)
def atari_update():
    yield same("the fast update, eager, not the reference's", reference_updating(), updating(eager))
    yield same("the fast update, compiled, not the reference's", reference_updating(), updating())
    yield same(
        "channels_last, eager: the reference's update", reference_updating(), reference_updating(channels_last=True)
    )


@row_of(ATARI)
def atari_one_graph():
    yield same("one graph, not .backward() and Adam(fused) in pieces", backward_updating(), updating())


@row_of(ATARI)
def atari_memory():
    """What the C library gives back depends on all that a process holds."""
    yield from whole_runs("freed memory kept", "keep=False")


def whole_runs(trick: str, without: str = "", with_it: str = "") -> Iterator[Pair]:
    """Training in processes of their own; the two sides' arguments of ``time_run``."""
    with tempfile.TemporaryDirectory() as cache:
        for amp in ("none", "bf16"):
            calls = (f"time_run({amp!r}, {arguments})" for arguments in (without, with_it))
            sides = (partial(printed_by_process, __name__, call, cache) for call in calls)
            yield Pair(f"{trick}: training, {amp.replace('none', 'float32')}", *sides, RUN_STEPS, RUN_STEPS)


def time_run(amp: str, keep: bool = True, acting_threads: int = 1, num_env_groups: int = 1) -> None:
    """Prints the seconds of RUN_STEPS environment steps of the fast rung, compiled."""
    args = fast.Args(compile=True, amp=amp, num_env_groups=num_env_groups, total_timesteps=RUN_STEPS)
    if not keep:
        fast.keep_freed_memory = lambda: None
    if acting_threads > 1:
        set_num_threads = torch.set_num_threads
        torch.set_num_threads = lambda num_threads: set_num_threads(max(num_threads, acting_threads))
    with tempfile.TemporaryDirectory() as folder:
        with redirect_stdout(io.StringIO()):
            fast.main(replace(args, runs_dir=folder, run_name="run"))
        print(RUN_STEPS / json.loads((Path(folder) / "run" / "summary.json").read_text())["sps"])


@row_of(ATARI)
def atari_bf16():
    """Without AMX or AVX-512 units for it, bf16 is emulated."""
    yield roughly("--amp bf16, not float32: update", updating(), updating(amp="bf16"))
    yield roughly("--amp bf16, not float32: policy step", acting(), acting(amp="bf16"))
    trick = "--amp bf16: the fast update, compiled, not the reference's"
    yield roughly(trick, reference_updating(amp="bf16"), updating(amp="bf16"))


class PixelAgent(fast.Agent):
    """Keeps frames as they come; its first convolution is the paper's, of 8 x 8 pixels in 4 channels."""

    @staticmethod
    def pack(obs: torch.Tensor) -> torch.Tensor:
        return obs

    def forward(self, obs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        blocks = self.conv1.weight.view(32, 2, 2, 4, 4, 4).permute(0, 3, 1, 4, 2, 5)
        weight = blocks.reshape(32, 4, 8, 8) / 255.0
        pixels = obs.float().contiguous(memory_format=torch.channels_last)
        hidden = F.relu(F.conv2d(pixels, weight, self.conv1.bias, 4)).permute(0, 2, 3, 1)
        hidden = F.relu(self.conv3(F.relu(self.conv2(hidden))))
        hidden = F.relu(self.linear(hidden.flatten(1))).float()
        with torch.autocast("cpu", enabled=False):
            return self.actor(hidden), self.critic(hidden).squeeze(-1)


@row_of(ATARI)
def atari_blocks():
    for amp, check in (("none", same), ("bf16", roughly)):
        changes = {"amp": amp}
        trick = f"frames kept as blocks of 4 x 4 pixels: update, {amp.replace('none', 'float32')}"
        yield check(trick, updating(parts=Parts(PixelAgent, **changes)), updating(**changes))


class BytewiseAgent(fast.Agent):
    @staticmethod
    def pack(obs: torch.Tensor) -> torch.Tensor:
        return fast.blocks_of_4(obs)


@row_of(ATARI)
def atari_pack():
    yield same("blocks made of four bytes at a time: policy step", acting(parts=Parts(BytewiseAgent)), acting())


@row_of(ATARI)
def atari_rounded():
    def at_every_step() -> Parts:
        parts = Parts(amp="bf16")
        parts.policy_step, parts.start = policy_without_copy(parts)
        return parts

    yield roughly(
        "bf16: matrices rounded once per rollout: policy step", acting(parts=at_every_step()), acting(amp="bf16")
    )


def policy_without_copy(parts: Parts) -> tuple[Callable, Callable]:
    """The policy step as in float32, but under autocast, which rounds all parameters at every step."""
    plain = fast.Args()
    policy_step, start = fast.make_policy_step(parts.agent, parts.rollout, plain)

    def under_autocast(obs: torch.Tensor) -> torch.Tensor:
        plain.amp = "bf16"  # read when the step is traced
        return policy_step(obs)

    return under_autocast, start


@row_of(ATARI)
def atari_gather():
    class Gathered:
        """In place of a rollout: what is gathered is handed in."""

        @staticmethod
        def minibatch(columns: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
            return columns

    def outside() -> Side:
        parts = Parts()
        agent = parts.agent
        update = fast.make_update(agent, parts.optimizer, Gathered, parts.args)
        compiled_update = CompiledStep(lambda *columns: update(columns), CPU)

        def step(inds: torch.Tensor) -> torch.Tensor:
            return compiled_update(*parts.rollout.minibatch(inds))

        return updates(parts, step, lambda: agent(agent.pack(parts.obs))[0], parts.optimizer.tensors())

    yield same("minibatch gathered in the compiled update", outside(), updating())


@row_of(ATARI)
def atari_gae():
    generator = torch.Generator().manual_seed(0)
    rewards, flags = torch.randn(2, NUM_STEPS, NUM_ENVS, generator=generator)
    terminations = dones = (flags > 2).float()
    values = torch.randn(NUM_STEPS + 1, NUM_ENVS, generator=generator)
    inputs = rewards, values, terminations, dones, fast.Args.gamma, fast.Args.gae_lambda
    steps = NUM_STEPS * NUM_ENVS
    loop, scan = (Side(lambda fn=module.compute_gae: [fn(*inputs)], steps) for module in (reference, fast))
    yield pair("GAE by a scan", loop, scan)


def playing(num_groups: int = 1, **changes) -> Side:
    """EnvPool and the compiled policy in turn; groups of environments play while the others' actions are computed."""
    parts = Parts(num_env_groups=num_groups, **changes)
    size = NUM_ENVS // num_groups
    pools = [make_atari_envs(ENV_ID, size, 1, first_index=i * size) for i in range(num_groups)]
    step = compiled()(parts.policy_step)
    latest = [torch.from_numpy(pool.reset()[0]) for pool in pools]
    actions = np.random.default_rng(1).integers(0, NUM_ACTIONS, (NUM_POLICY_STEPS, NUM_ENVS))

    def burst():
        parts.start()
        # What is played is random, so that all sides see the same games.
        for i, pool in enumerate(pools):
            step(latest[i])
            pool.send(actions[0, i * size : (i + 1) * size])
        for t in range(1, NUM_POLICY_STEPS + 1):
            for i, pool in enumerate(pools):
                latest[i] = torch.from_numpy(pool.recv()[0])
                step(latest[i])
                if t < NUM_POLICY_STEPS:
                    pool.send(actions[t, i * size : (i + 1) * size])
        return games()

    def games():
        yield torch.cat(latest).float()

    return Side(burst, NUM_POLICY_STEPS * NUM_ENVS, NUM_POLICY_STEPS, [parts.rollout.row])


@row_of(ATARI)
def atari_groups():
    for amp in ("none", "bf16"):
        trick = f"two groups of environments in turn, {amp.replace('none', 'float32')}: playing"
        yield pair(trick, playing(amp=amp), playing(num_groups=2, amp=amp))
    yield from whole_runs("two groups of environments in turn", with_it="num_env_groups=2")


@row_of(ATARI)
def atari_acting_thread():
    cores = available_cores()
    yield from whole_runs(f"acting on 1 thread, not {cores}", f"acting_threads={cores}")


@row_of(ATARI)
def atari_update_threads():
    yield same(f"update on {available_cores()} threads, not 1", updating(num_threads=1), updating())
