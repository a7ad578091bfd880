"""Random numbers that depend on what they are for, and on no process, thread or number of learners."""

from collections.abc import Iterable

import numpy as np

ACTION_NOISE, PERMUTATIONS = 0, 1


class Streams:
    """Independent streams keyed by (seed, purpose, number, iteration).

    Philox is counter-based (https://doi.org/10.1145/2063384.2063405): the key is the seed, purpose and number, and the
    counter starts at the iteration, so that a stream is found without drawing those before it.

    Args:
        seed: of the run.
        purpose: ACTION_NOISE or PERMUTATIONS.
    """

    def __init__(self, seed: int, purpose: int) -> None:
        self._seed, self._purpose = seed, purpose
        # One generator that is put in its place each time: making a new one takes four times as long.
        self._philox = np.random.Philox(0)
        self._generator = np.random.Generator(self._philox)

    def at(self, number: int, iteration: int) -> np.random.Generator:
        """The stream of an environment or shard in an iteration; valid until the next call."""
        self._philox.state = {
            "bit_generator": "Philox",
            "state": {
                "counter": np.array([0, 0, iteration, 0], np.uint64),
                "key": np.array([self._seed, self._purpose << 48 | number], np.uint64),
            },
            "buffer": np.zeros(4, np.uint64),
            "buffer_pos": 4,
            "has_uint32": 0,
            "uinteger": 0,
        }
        return self._generator


def gumbel_noise(streams: Streams, envs: Iterable[int], iteration: int, out: np.ndarray) -> None:
    """Fills ``out`` [T, n, num_actions] with Gumbel(0, 1): the argmax of logits plus it samples their softmax.

    Args:
        envs: global numbers of the n environments.
    """
    for column, env in enumerate(envs):
        out[:, column] = streams.at(env, iteration).standard_exponential(out[:, column].shape, dtype=np.float32)
    with np.errstate(divide="ignore"):  # an exponential of exactly 0 wins, as it should
        np.log(out, out=out)
    np.negative(out, out=out)
