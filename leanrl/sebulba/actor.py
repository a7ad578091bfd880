"""Actor threads: their environments, copies of the policy, and the rollouts that the script's acting loop fills."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import dataclass

import gymnasium as gym
import numpy as np
import torch
import torch.nn as nn

from leanrl.sebulba.args import pool_threads
from leanrl.sebulba.environments import make_pool
from leanrl.sebulba.mailbox import Mailbox, Stopped
from leanrl.sebulba.randomness import policy_size
from leanrl.sebulba.rollout import Header, Rollout
from leanrl.sebulba.start import Start
from leanrl.support.atari import whole_games
from leanrl.support.devices import synchronize_stream
from leanrl.support.episodes import EpisodeStatistics
from leanrl.support.executables import URGENT


def flatten(agent: nn.Module) -> torch.Tensor:
    """A network's parameters and buffers as one new vector [P], ready to send, of the widest of their types."""
    return torch.cat([x.reshape(-1) for x in agent.state_dict().values()])


class ActingAgent:
    """A copy of a network to act with, called like the network itself.

    Args:
        agent: the network.
        amp: with bf16, its module ``torso`` is cast to bfloat16 once per version of the parameters; autocast would do
            so at every step, with the same result.
    """

    def __init__(self, agent: nn.Module, amp: str) -> None:
        self._agent = deepcopy(agent)
        if amp == "bf16" and hasattr(agent, "torso"):
            self._agent.torso.bfloat16()
        self._state = list(self._agent.state_dict().values())

    def __call__(self, obs: torch.Tensor):
        return self._agent(obs)

    @torch.no_grad()
    def load(self, flat: torch.Tensor) -> None:
        """Overwrites parameters and buffers in place with ``flat`` [P] (see ``flatten``)."""
        pieces = flat.split([x.numel() for x in self._state])
        torch._foreach_copy_(self._state, [piece.view(x.shape) for piece, x in zip(pieces, self._state, strict=True)])


@dataclass
class ActorThread:
    """Plays the run's rollouts, from the first or from where the run resumes, each with the parameters that are due.

    Attributes:
        name: its name in error messages.
        pieces: its share of each shard, in the order of its environments.
        env_indices: global indices of its environments.
        envs: those environments.
        blocks: slices of its environments, each acted for in one call.
        example: inputs of acting for one block: observations [n, ...], and zeros [n, k] as noise.
    """

    process: Start
    """the process it belongs to"""
    index: int
    """its number among the threads of its actor device"""
    agent: ActingAgent
    """its own network"""
    first_step: int
    """environment step at which the run starts or resumes"""
    fail: Callable[[BaseException, str], None]
    """called with the error that ended the thread, and its name"""

    def __post_init__(self) -> None:
        start, args, layout, actor = self.process, self.process.args, self.process.layout, self.process.member.actor
        self.device, self.action_space = start.device, start.action_space
        self.name = layout.thread_name(actor, self.index)
        self.pieces = layout.pieces_of_thread(actor, self.index)
        self.env_indices = layout.thread_envs(actor, self.index)
        num_envs = len(self.env_indices)
        pool = {"num_threads": pool_threads(args, layout), "start": self.first_step}
        self.envs = make_pool(args.env_id, self.env_indices, args.seed, args.protocol, args.env_backend, **pool)
        # An output's last bits depend on the batch size, so exactness needs blocks of the same size in every layout.
        size = len(self.pieces[0].envs) if args.exact_reduction else num_envs
        self.blocks = [slice(first, first + size) for first in range(0, num_envs, size)]
        self.obs = Rollout.allocate(start.space, self.action_space, 1, num_envs, self.device).obs[0]
        self.host_obs = torch.zeros(self.obs.shape, dtype=self.obs.dtype, pin_memory=True) if self.obs.is_cuda else None
        action_size = int(np.prod(self.action_space.shape))  # 1 for Discrete actions
        self.choices = torch.zeros(args.num_steps + 1, action_size + 2, num_envs, device=self.device)
        self.example = self.obs[:size], torch.zeros(size, policy_size(self.action_space), device=self.device)
        self.episodes = EpisodeStatistics(num_envs)
        self.stopped = False
        self._thread: threading.Thread | None = None
        self._free: Mailbox[list[Rollout]] = Mailbox(args.timeout)
        self._played: Mailbox[list[Rollout]] = Mailbox(args.timeout)
        self._params: Mailbox[tuple[int, torch.Tensor]] = Mailbox(args.timeout)
        # How many rollouts a thread may play before the first is given back (once it has been sent or put into a
        # shard, before its update). With a fixed lag above 0, it may play on while other threads finish; with the
        # newest parameters, it plays one rollout while another waits for the learner.
        for _ in range(2 if args.policy_lag == "newest" else args.policy_lag + 1):
            self._free.put([start.allocate(len(piece.envs)) for piece in self.pieces])

    def start(self, play: Callable, *args) -> None:
        """Runs ``play(self, *args)`` on a thread; all that it calls must be compiled already. An error ends the run."""
        self._thread = threading.Thread(target=self._run, args=(play, *args), name=self.name, daemon=True)
        self._thread.start()

    @torch.no_grad()
    def _run(self, play: Callable, *args) -> None:
        # One PyTorch thread: a second would spin while it waits for work, and with more threads than cores, OpenMP puts
        # all threads of the process to sleep sooner. The first query on a new thread overwrites its number with the
        # process's, so query before setting it.
        torch.get_num_threads()
        torch.set_num_threads(1)
        on_gpu = self.device.type == "cuda"
        try:
            with torch.cuda.stream(torch.cuda.Stream(self.device, priority=URGENT)) if on_gpu else nullcontext():
                play(self, *args)
        except Stopped:
            pass
        except BaseException as error:  # nobody else would see it
            self._played.close()
            self.fail(error, self.name)
        finally:
            self.envs.close()

    def rollouts(self) -> Iterator["ThreadRollout"]:
        """The rollouts of the run, in order; each is delivered when the body of the loop has filled it.

        Before each, ``agent`` receives the parameters to play it with.
        """
        version, lag = self.first_step // self.process.batch_size, self.process.args.policy_lag
        for number in range(version + 1, self.process.num_updates + 1):
            waiting = time.time()
            pieces = self._free.get(f"a free buffer for rollout {number}")
            started = time.time()
            # The first lag + 1 rollouts use the initial parameters; with lag "newest", each uses what has arrived.
            while not self._params.empty() if lag == "newest" else version < number - 1 - lag:
                version, params = self._params.get("new parameters from the learner")
                self.agent.load(params)
                synchronize_stream(self.device)  # before their memory is freed and reused
            header = Header(number, version, started, params_wait=time.time() - started, queue_put=started - waiting)
            yield (rollout := ThreadRollout(self, pieces, header))
            rollout.fill_pieces()
            synchronize_stream(self.device)  # the main thread reads it on another stream
            self._played.put(pieces)

    def take(self) -> list[Rollout]:
        """The next rollout, a buffer for each of ``pieces``, to be given back.

        Raises:
            Stopped: the thread failed or was stopped.
            Stalled: none arrived in time.
        """
        return self._played.get(f"a rollout from {self.name}")

    def put_params(self, version: int, params: torch.Tensor) -> None:
        """Hands over the next version of the parameters [P], which must not be overwritten."""
        synchronize_stream(self.device)  # the thread copies them on its own stream
        self._params.put((version, params))

    def give_back(self, rollout: list[Rollout]) -> None:
        """Lets the thread overwrite a rollout that ``take`` returned."""
        synchronize_stream(self.device)  # it does so on its own stream
        self._free.put(rollout)

    def stop(self) -> None:
        """Makes the thread end at its next step or wait, and releases whoever waits for it."""
        self.stopped = True
        for mailbox in (self._free, self._played, self._params):
            mailbox.close()

    def join(self, seconds: float) -> None:
        """Waits until the thread has ended, if it was started."""
        if self._thread is not None:
            self._thread.join(seconds)


class ThreadRollout:
    """A rollout while a thread plays it. A step is ``observe``, filling ``choices``, ``actions``, ``record``.

    Args:
        thread: the thread, which owns the memory.
        pieces: the buffers that ``fill_pieces`` fills.
        header: what is known of it so far.

    Attributes:
        steps: indices of its T steps in the run; those of rollout r start at r T.
        choices: [T + 1, 3, n], to be filled with actions, their log-probabilities and values; of the last row only the
            values count. Actions of several dimensions take as many rows.
    """

    def __init__(self, thread: ActorThread, pieces: list[Rollout], header: Header) -> None:
        self._thread, self._header = thread, header
        first = thread.env_indices.start
        columns = [slice(piece.envs.start - first, piece.envs.stop - first) for piece in thread.pieces]
        self._pieces = list(zip(pieces, columns, strict=True))
        self.choices = thread.choices
        num_steps = len(self.choices) - 1
        self.steps = range(int(header.rollout) * num_steps, int(header.rollout + 1) * num_steps)
        shape = num_steps, thread.envs.num_envs
        self._outcome = {name: np.zeros(shape, bool) for name in ("terminations", "dones", "resets")}
        self._outcome |= {name: np.full(shape, np.nan, np.float32) for name in ("rewards", "returns", "lengths")}
        self._seconds = dict.fromkeys(("inference", "device_to_host", "env_step"), 0.0)

    def _lap(self, name: str) -> None:
        now = time.perf_counter()
        self._seconds[name] += now - self._lap_start
        self._lap_start = now

    def observe(self, step: int, obs: np.ndarray) -> torch.Tensor:
        """Writes the observations [n, ...] before step ``step``, or after the last one; returns them on the device.

        Raises:
            Stopped: the thread should end.
        """
        thread, self._lap_start = self._thread, time.perf_counter()
        if thread.stopped:
            raise Stopped
        source = torch.from_numpy(obs)
        if thread.host_obs is not None:
            source = thread.host_obs.copy_(source)
        thread.obs.copy_(source, non_blocking=True)
        for piece, columns in self._pieces:
            piece.obs[step].copy_(thread.obs[columns])
        return thread.obs

    def actions(self, step: int) -> np.ndarray:
        """The actions in ``choices[step]`` as the environments take them: [n], or [n, action_dim] within bounds."""
        self._lap("inference")
        actions, space = self.choices[step, :-2].cpu().numpy(), self._thread.action_space
        self._lap("device_to_host")
        if isinstance(space, gym.spaces.Box):
            return np.clip(actions.T, space.low, space.high, order="C")
        return actions[0].astype(space.dtype)

    def record(self, step: int, rewards, terminations, truncations, resets, infos: dict) -> None:
        """Writes what the environments returned, arrays [n]; ``resets`` is where this step only reset them."""
        self._lap("env_step")
        outcome, dones = self._outcome, terminations | truncations
        outcome["rewards"][step], outcome["terminations"][step] = rewards, terminations
        outcome["dones"][step], outcome["resets"][step] = dones, resets
        raw_rewards, ends = whole_games(rewards, dones, infos)
        ended = self._thread.episodes.add_step(raw_rewards, ends, resets)
        outcome["returns"][step, ends], outcome["lengths"][step, ends] = ended

    def fill_pieces(self) -> None:
        """Copies everything to the pieces, the header included."""
        header = torch.tensor(self._header._replace(ended=time.time(), **self._seconds), dtype=torch.float64)
        for piece, columns in self._pieces:
            actions = self.choices[:-1, :-2, columns].mT
            piece.actions.view(actions.shape).copy_(actions)
            piece.logprobs.copy_(self.choices[:-1, -2, columns])
            piece.values.copy_(self.choices[:, -1, columns])
            for name, values in self._outcome.items():
                getattr(piece, name).copy_(torch.from_numpy(values[:, columns]))
            piece.header.copy_(header)
