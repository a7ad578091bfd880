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
from types import SimpleNamespace

import numpy as np
import torch
import torch.nn.functional as F

import leanrl.ppo_atari_envpool as reference
import leanrl.ppo_atari_envpool_torchcompile as fast
from leanrl.support.atari import make_atari_envs
from leanrl.support.devices import available_cores, keep_freed_memory
from leanrl.tools.ablate_off_policy import state_tensors
from leanrl.tools.ablation import (
    Compiler,
    Group,
    Pair,
    Side,
    compiled,
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
    """What a script's ``main`` makes before its loop, and a finished rollout; the same numbers every time."""

    def __init__(self, module=fast, channels_last: bool = True, **changes) -> None:
        keep_freed_memory()
        self.args = args = module.Args(**changes)
        obs = frames((NUM_STEPS + 1) * NUM_ENVS).unflatten(0, (NUM_STEPS + 1, NUM_ENVS))
        self.obs = obs[0]
        self.rollout = module.Rollout.allocate(self.obs, args)
        with torch.random.fork_rng([]):
            torch.manual_seed(1)
            self.agent = module.Agent(NUM_ACTIONS)
            if channels_last:
                self.agent.to(memory_format=torch.channels_last)
            else:
                self.rollout = self.rollout._replace(obs=torch.zeros_like(obs))
            self.rollout.obs.copy_(obs)
            for column in (self.rollout.advantages, self.rollout.returns, self.rollout.values):
                column.normal_()
            self.rollout.logprobs.fill_(-math.log(NUM_ACTIONS))
            self.rollout.actions.random_(0, NUM_ACTIONS)
            self.rollout.weights.fill_(1.0)
            self.inds = torch.randperm(NUM_STEPS * NUM_ENVS).split(MINIBATCH)
        adam = getattr(module, "Adam", torch.optim.Adam)
        self.optimizer = adam(self.agent.parameters(), lr=args.learning_rate, eps=1e-5)
        self.update = module.make_update(self.agent, self.optimizer, self.rollout, args)
        if module is fast:
            rows = (NUM_STEPS + 1) * args.num_env_groups
            self.noise = torch.zeros(rows, NUM_ENVS // args.num_env_groups, NUM_ACTIONS)
            self.policy_step, self.start = fast.make_policy_step(self.agent, self.rollout, self.noise, args)


def updates(parts: Parts, step: Callable, num_threads: int | None = None) -> Side:
    """NUM_UPDATES updates: ``step(mb_inds)``; what is compared is what the network says after them, too."""

    @torch.enable_grad()
    def burst():
        for inds in parts.inds[:NUM_UPDATES]:
            losses = step(inds)
        return losses, parts.agent(parts.obs)[0].logits.detach()

    steps = NUM_UPDATES * MINIBATCH / parts.args.update_epochs
    touched = [*parts.agent.parameters(), *state_tensors(parts.optimizer)]
    return Side(burst, steps, NUM_UPDATES, touched, num_threads or available_cores())


def updating(compiler: Compiler | None = None, num_threads: int | None = None, **changes) -> Side:
    """The fast variant's updates, by default compiled."""
    parts = Parts(**changes)
    return updates(parts, (compiler or compiled())(parts.update), num_threads)


def reference_updating(channels_last: bool = True, **changes) -> Side:
    """The reference's, eager."""
    parts = Parts(reference, channels_last, **changes)
    return updates(parts, parts.update)


def updating_in_pieces() -> Side:
    """The reference's, with the fused Adam, as ``torch.compile`` compiles it."""
    parts = Parts(reference)
    parts.optimizer.param_groups[0]["fused"] = True
    return updates(parts, in_pieces(parts.update))


def acting(**changes) -> Side:
    """NUM_POLICY_STEPS policy steps of all environments."""
    parts = Parts(**changes)
    rollout = parts.rollout
    step = compiled()(parts.policy_step)

    def burst():
        parts.start()
        parts.noise.zero_()
        for _ in range(NUM_POLICY_STEPS):
            step(parts.obs)
        return rollout.logprobs[:NUM_POLICY_STEPS], rollout.values[:NUM_POLICY_STEPS]

    touched = [parts.noise, rollout.obs, rollout.actions, rollout.logprobs, rollout.values]
    return Side(burst, NUM_POLICY_STEPS * NUM_ENVS, NUM_POLICY_STEPS, touched, num_threads=1)


same = partial(pair, tolerance=TOLERANCE)
# In bfloat16 the sides agree to its two or three digits.
roughly = partial(pair, tolerance=0.2)


# ---------------------------------------------------------------------------------------------------------------- ROWS


@row_of(ATARI)
def atari_update():
    yield same("the update compiled, not the reference's", reference_updating(), updating())
    channels_first = reference_updating(channels_last=False)
    yield same("channels_last, eager: the reference's update", channels_first, reference_updating())


@row_of(ATARI)
def atari_one_graph():
    yield same("one graph, not .backward() and Adam(fused) in pieces", updating_in_pieces(), updating())


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
    """Prints the seconds of RUN_STEPS environment steps of the fast variant, compiled."""
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
    trick = "--amp bf16: the update compiled, not the reference's"
    yield roughly(trick, reference_updating(amp="bf16"), updating(amp="bf16"))


@row_of(ATARI)
def atari_gather():
    parts = Parts()
    # In place of a rollout: what is gathered is handed in.
    gathered = SimpleNamespace(obs=parts.rollout.obs, minibatch=lambda columns: fast.Minibatch(*columns))
    update = fast.make_update(parts.agent, parts.optimizer, gathered, parts.args)
    step = compiled()(lambda *columns: update(columns))
    outside = updates(parts, lambda inds: step(*parts.rollout.minibatch(inds)))
    yield same("minibatch gathered in the compiled update", outside, updating())


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

    return Side(burst, NUM_POLICY_STEPS * NUM_ENVS, NUM_POLICY_STEPS)


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
