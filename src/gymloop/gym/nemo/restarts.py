"""A hosted server that died or hangs is started again on its address, so many times and no more.

Its sessions are lost with it: rollouts that had one fail with a typed error and are tried again, as after any failure
of an environment. One that does not come up again is not tried a further time, since it would die the same way.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from gymloop.errors import GymloopError, InfraError
from gymloop.gym.nemo.server import NemoGymServer


@dataclass(slots=True)
class Restarts:
    """What a run may spend on servers that die.

    Attributes:
        most: restarts of one server over the run.
        say: told of each death and each return.
    """

    most: int
    say: Callable[[str], object]
    _taken: Counter[str] = field(default_factory=Counter)

    async def revive(self, server: NemoGymServer, deadline_s: float, trouble: GymloopError) -> None:
        """Return when the server answers again.

        Args:
            server: hosted by this process.
            deadline_s: time until it must be ready, seconds.
            trouble: what is wrong with it, by name and with the end of its log.

        Raises:
            InfraError: it has died too often, or does not come up again.
        """
        taken = self._taken[server.instance]
        if taken >= self.most:
            if not self.most:
                raise trouble
            raise InfraError(
                f"{server.name} failed again after {taken} restarts (health.max_server_restarts): {trouble}"
            ) from trouble
        self._taken[server.instance] = taken + 1
        self.say(f"restart {taken + 1} of {self.most} (health.max_server_restarts), since {trouble}")
        try:
            await server.restart(deadline_s)
        except InfraError as error:
            raise InfraError(f"{server.name} was started again and failed at once: {error}") from trouble
        self.say(f"{server.name} answers again at {server.url}; the sessions it had are lost")
