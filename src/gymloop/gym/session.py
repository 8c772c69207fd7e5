"""Sessions of an environment that lives in this process; each is one instance of the user's class.

Whatever goes wrong inside the user's code is an ``InfraError`` that names the environment and the method, so it is
retried in a new session and never becomes a reward. What the model did wrong is text for the model.
"""

from __future__ import annotations

import asyncio
import inspect
import itertools
import math
import numbers
import random
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import orjson

from gymloop.errors import ConfigError, DataError, GymloopError, InfraError, PolicyError
from gymloop.gym.contract import ROLLOUT_SEED, Row, Verdict
from gymloop.gym.deadline import within
from gymloop.gym.environment import Call, Environment, overrides
from gymloop.gym.items import Message, call_item, chat_call, chat_messages, chat_tools, message_item, output_item
from gymloop.gym.tools import ToolError, nearest
from gymloop.threads import in_thread

_CLOSE_S = 10.0


class InProcessSource:
    """Opens sessions of one environment class.

    Args:
        name: as rows carry it in ``agent_ref.name``.
        environment: the class.
        kwargs: its constructor's arguments, the same for every session.

    Raises:
        ConfigError: the class has no ``verify``, or ``kwargs`` do not fit its constructor.
    """

    def __init__(self, name: str, environment: type[Environment], kwargs: Mapping[str, Any] | None = None) -> None:
        if not overrides(environment, "verify"):
            raise ConfigError(
                f"environment {name}: {environment.__qualname__} has no verify(), so nothing gives a reward"
            )
        self.name = name
        self.environment = environment
        self.kwargs = dict(kwargs or {})
        try:
            inspect.signature(environment).bind(**self.kwargs)
        except TypeError as error:
            raise ConfigError(f"environment {name}: kwargs do not fit {environment.__qualname__}: {error}") from error
        self._create()  # a constructor that refuses its arguments says so before anything starts

    @property
    def tools(self) -> list[dict[str, Any]]:
        """Flat function tools, as rows carry them."""
        return [spec.schema() for spec in self.environment.tool_specs.values()]

    async def seed_session(self, row: Row) -> InProcessSession:
        """Make an instance and seed it with this row."""
        environment = self._create()
        session = InProcessSession(self.name, environment)
        environment.rng = random.Random(row.get(ROLLOUT_SEED, 0))
        row = {key: value for key, value in row.items() if key != ROLLOUT_SEED}
        environment.row = row
        try:
            await session.run("seed", environment.seed, row)
        except BaseException as error:
            try:
                await within(_CLOSE_S, f"environment {self.name}, close", session.close())
            except InfraError as second:
                error.add_note(f"and then: {second}")
            raise
        return session

    def generate(self, num_tasks: int, seed: int) -> list[Row]:
        """Rows from the environment's generator; the same seed gives the same rows.

        Raises:
            ConfigError: the environment has no generator, or it ends or fails before ``num_tasks``.
        """
        where = f"environment {self.name}, tasks"
        if not overrides(self.environment, "tasks"):
            raise ConfigError(f"{where}: {self.environment.__qualname__} generates no tasks; give data_path instead")
        try:
            tasks = list(itertools.islice(self._create().tasks(random.Random(seed)), num_tasks))
        except GymloopError:
            raise
        except Exception as error:
            raise ConfigError(f"{where}: {type(error).__name__}: {error}") from error
        if len(tasks) < num_tasks:
            raise ConfigError(f"{where}: ended after {len(tasks)} of the {num_tasks} tasks asked for")
        return [self._row(task, f"{where}[{index}]") for index, task in enumerate(tasks)]

    def _row(self, task: Mapping[str, Any], where: str) -> Row:
        fields = dict(task)
        prompt = fields.pop("prompt", None)
        if not prompt or not isinstance(prompt, str | list):
            raise ConfigError(f"{where}: 'prompt' is {prompt!r}; expected text or a list of messages")
        return {
            **fields,
            "responses_create_params": {
                "input": [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt,
                "tools": self.tools,
            },
            "agent_ref": {"type": "responses_api_agents", "name": self.name},
        }

    def _create(self) -> Environment:
        try:
            return self.environment(**self.kwargs)
        except GymloopError:
            raise
        except Exception as error:
            raise ConfigError(
                f"environment {self.name}: {self.environment.__qualname__}(**{self.kwargs}) raised "
                f"{type(error).__name__}: {error}"
            ) from error


class InProcessSession:
    """One rollout in one instance."""

    def __init__(self, name: str, environment: Environment) -> None:
        self._name = name
        self.environment = environment
        self._closed = False

    async def call_tool(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Check the arguments and run the tool. A result that is not text is given to the model as JSON."""
        specs = self.environment.tool_specs
        if name not in specs:
            return f"Error: there is no tool '{name}'{nearest(name, specs)}"
        try:
            bound = specs[name].bind(arguments)
            result = await self.run(name, getattr(self.environment, name), **bound)
        except ToolError as error:
            return f"Error: {error}"
        if isinstance(result, str):
            return result
        try:
            return orjson.dumps(result).decode()
        except TypeError as error:
            raise InfraError(
                f"environment {self._name}, {name}: returned {type(result).__name__}, not text", cause="bad_reply"
            ) from error

    async def verify(self, response: Mapping[str, Any]) -> Verdict:
        """Score the conversation; a plain number is a verdict without components."""
        value = await self.run("verify", self.environment.verify, response)
        where = f"environment {self._name}, verify"
        if isinstance(value, Verdict):
            try:
                orjson.dumps(value.details)
            except TypeError as error:  # a record that cannot be written would end the run
                raise InfraError(f"{where}: details are not JSON ({error})", cause="bad_reply") from error
            return value
        if isinstance(value, bool) or not isinstance(value, numbers.Real) or not math.isfinite(value):
            raise InfraError(f"{where}: returned {value!r}; expected a Verdict or a finite number", cause="bad_reply")
        return Verdict(float(value))

    async def close(self) -> None:
        """Close the instance, once."""
        if not self._closed:
            self._closed = True
            await self.run("close", self.environment.close)

    async def run(self, label: str, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call one method of the instance, awaiting it when it is ``async``.

        Raises:
            InfraError: it raised something that is not meant for the model or the caller.
        """
        where = f"environment {self._name}, {label}"
        try:
            if self.environment.blocking and not inspect.iscoroutinefunction(method):
                return await in_thread(partial(method, *args, **kwargs), label)
            result = method(*args, **kwargs)
            # bounded: the collector runs every call of a session by ``within``
            return await result if inspect.isawaitable(result) else result
        except (ConfigError, DataError, PolicyError):
            raise
        except InfraError as error:
            raise InfraError(f"{where}: {error}", cause=error.cause) from error
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is None or task.cancelling():  # the caller's own
                raise
            raise InfraError(f"{where}: CancelledError that nobody asked for", cause="raised") from error
        except (Exception, SystemExit) as error:
            if isinstance(error, ToolError) and label in self.environment.tool_specs:
                raise
            raise InfraError(f"{where}: {type(error).__name__}: {error}", cause="raised") from error


async def demonstrate(source: InProcessSource, row: Row) -> dict[str, Any]:
    """One demonstration for the supervised warm-up: the environment's solver, played through the real tools.

    Returns:
        ``{"messages": [...], "tools": [...]}`` in chat form.

    Raises:
        ConfigError: the environment has no solver, or its own ``verify`` does not give it ``max_reward``.
    """
    environment_class = source.environment
    if not overrides(environment_class, "solve"):
        raise ConfigError(
            f"environment {source.name}: {environment_class.__qualname__} has no solve(), "
            "so a supervised warm-up needs sft_warmup.data_path"
        )
    params = row["responses_create_params"]
    messages: list[Message] = chat_messages(params["input"], params.get("instructions"))
    output: list[dict[str, Any]] = []
    session = await source.seed_session(row)
    try:
        solver = session.environment.solve(row)
        result: str | None = None
        while True:  # bounded: by the solver's steps
            try:
                step: Call = next(solver) if result is None else solver.send(result)
            except StopIteration as end:
                answer = end.value
                break
            call = chat_call(f"call_{len(messages)}", step.name, orjson.dumps(dict(step.arguments)).decode())
            result = await session.call_tool(step.name, step.arguments)
            messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
            output += [call_item(f"fc_{len(output)}", call, "completed"), output_item(call["id"], result)]
        if not isinstance(answer, str):
            raise ConfigError(f"environment {source.name}, solve: returned {answer!r}; expected the final message")
        messages.append({"role": "assistant", "content": answer})
        output.append(message_item(f"msg_{len(output)}", answer, "completed"))
        verdict = await session.verify({"status": "completed", "incomplete_details": None, "output": output})
    finally:
        await session.close()
    if not math.isclose(verdict.reward, environment_class.max_reward, rel_tol=1e-6, abs_tol=1e-6):
        raise ConfigError(
            f"environment {source.name}, solve: its own verify gives it {verdict.reward:g} {dict(verdict.components)}, "
            f"not max_reward = {environment_class.max_reward:g}, on {params['input']!r}"
        )
    return {"messages": messages, "tools": chat_tools(params.get("tools") or ())}
