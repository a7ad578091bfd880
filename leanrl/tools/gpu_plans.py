"""What ``leanrl.tools.gpu`` checks and measures, algorithm by algorithm."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Literal

import torch

from leanrl.sebulba.args import SebulbaArgs
from leanrl.support.devices import available_cores
from leanrl.tools.profile import envpool_alone, in_process
from leanrl.tools.trials import Contender, Deadline, contenders_of, modes_of

Algorithm = Literal["sac", "td3", "ppo", "ppo_atari", "cleanba_ppo", "cleanba_impala", "dqn"]


@dataclass(frozen=True)
class Pool:
    """Environments that EnvPool steps alone: no script that plays them can be faster."""

    num_envs: int
    protocol: str
    """a key of ``support.atari.PROTOCOLS``"""
    env_id: str = "Breakout-v5"

    def measure(self, deadline: Deadline | None = None) -> dict:
        """Steps per second with random actions, on all cores."""
        options = (self.env_id, self.num_envs, self.protocol, min(self.num_envs, available_cores()))
        return {**asdict(self), **in_process(envpool_alone, *options, deadline=deadline)}


@dataclass(frozen=True)
class Plan:
    """How one algorithm is checked and measured."""

    reference: str | None
    """the eager script; None where that is a mode of the fast one"""
    modes: tuple[str, ...]
    """SCRIPT:MODE each, the plain one first"""
    check_flags: tuple[str, ...]
    """of a run that trains so shortly that rounding does not grow into other episodes; with two checkpoints"""
    steps: tuple[int, int]
    """environment steps of a measured run: without CUDA graphs, and with them"""
    expected_seconds: float = 25.0
    """what a measured run is taken to last before one has been: imports, compilation, capture, its steps"""
    flags: tuple[str, ...] = ()
    """of a measured run"""
    bf16_modes: tuple[str, ...] = ()
    """those of ``modes`` that run with --amp bf16 too"""
    part_modes: tuple[str, ...] = ()
    """those whose parts of a step are shown, the last one first"""
    pool: Pool | None = None
    """whose speed stands beside those of the modes"""


def entries_of(script: str) -> tuple[str, ...]:
    """Every mode of ``script``, plainest first."""
    return tuple(f"{script}:{mode}" for mode in modes_of(script))


# Forty updates: between a compiled run and an eager one on a CPU rounding has grown to 2e-4 (TD3) and 2e-3 (SAC) of the
# way by then, and to 3e-2 by the hundredth, because each action leads HalfCheetah a little further apart.
OFF_POLICY_CHECK = ("--learning-starts=1000", "--checkpoint-every=1000", "--total-timesteps=1040")


def off_policy(script: str) -> Plan:
    """SAC's and TD3's."""
    fast = f"{script}_torchcompile"
    return Plan(
        script,
        entries_of(fast),
        OFF_POLICY_CHECK,
        steps=(3_000, 20_000),
        flags=("--learning-starts=1000",),
        expected_seconds=45.0,
        part_modes=(f"{fast}:compile+cudagraphs", f"{fast}:compile+one-graph"),
    )


# Two rollouts, with four updates each. The optimisers' first steps are as long in directions in which the gradient is
# only rounding; with the scripts' own learning rates they can lead to other actions in the second rollout (IMPALA on a
# CPU, compiled beside eager: 6e-2 of the way, and 3e-5 with this one).
GAMES_CHECK = ("--learning-rate=1e-5",)
CLEANBA_ENVS = SebulbaArgs.local_num_envs * SebulbaArgs.num_actor_threads


def cleanba(script: str, num_steps: int, iterations: tuple[int, int], check_flags: tuple[str, ...] = ()) -> Plan:
    """A distributed script's, actor threads and learner on one GPU; ``num_steps`` is its default."""
    batch_size = CLEANBA_ENVS * num_steps
    return Plan(
        None,
        entries_of(script),
        # In the shapes that are measured, which the compiler's cache then has.
        (*GAMES_CHECK, *check_flags, f"--checkpoint-every={batch_size}", f"--total-timesteps={2 * batch_size}"),
        steps=(iterations[0] * batch_size, iterations[1] * batch_size),
        expected_seconds=50.0,
        bf16_modes=(f"{script}:compile+cudagraphs",),
        pool=Pool(CLEANBA_ENVS, "cleanba"),
    )


PLANS: dict[Algorithm, Plan] = {
    "sac": off_policy("sac_continuous_action"),
    "td3": off_policy("td3_continuous_action"),
    "ppo": Plan(
        "ppo_continuous_action",
        entries_of("ppo_continuous_action_torchcompile"),
        # Pendulum's motion is smooth: rounding stays rounding. HalfCheetah's would not in so many steps.
        (
            *("--env-id=Pendulum-v1", "--num-steps=64", "--num-minibatches=1"),
            *("--checkpoint-every=64", "--total-timesteps=192"),
        ),
        steps=(6_144, 40_960),
        part_modes=("ppo_continuous_action_torchcompile:compile+cudagraphs",),
    ),
    "ppo_atari": Plan(
        "ppo_atari_envpool",
        entries_of("ppo_atari_envpool_torchcompile"),
        (*GAMES_CHECK, "--update-epochs=1", "--checkpoint-every=1024", "--total-timesteps=2048"),
        steps=(30_720, 81_920),
        bf16_modes=("ppo_atari_envpool_torchcompile:compile+one-graph",),
        part_modes=tuple(f"ppo_atari_envpool_torchcompile:compile+{graphs}" for graphs in ("cudagraphs", "one-graph")),
        pool=Pool(8, "cleanrl"),
    ),
    "cleanba_ppo": cleanba("cleanba_ppo", 128, iterations=(3, 8), check_flags=("--update-epochs=1",)),
    "cleanba_impala": cleanba("cleanba_impala", 20, iterations=(20, 60)),
    "dqn": Plan(
        "dqn",
        entries_of("dqn_torchcompile"),
        # Hardly any greedy actions: one that is decided by rounding would lead elsewhere.
        ("--learning-starts=1000", "--checkpoint-every=1000", "--total-timesteps=2000", "--exploration-fraction=100"),
        steps=(20_000, 60_000),
        flags=("--learning-starts=1000",),
        part_modes=("dqn_torchcompile:compile+cudagraphs",),
    ),
}


def contenders_with_bf16(
    plan: Plan, entries: Sequence[str], device: torch.device, flags: Sequence[str]
) -> list[Contender]:
    """Those of ``entries``, then those of them that ``plan`` wants in bfloat16 too."""
    rounded = [f"{entry} --amp bf16" for entry in entries if entry in plan.bf16_modes]
    return contenders_of([*entries, *rounded], "algorithms", device, flags)


def is_fastest(contender: Contender) -> bool:
    """Whether a contender has all that its script can do for speed."""
    return any(f"--compile {graphs}" in contender.label for graphs in ("--cudagraphs", "--one-graph"))
