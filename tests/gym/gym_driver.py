"""NeMo Gym's own RunHelper and RolloutCollectionHelper, run by NeMo Gym's interpreter: ``python gym_driver.py WISH``.

``WISH`` is a JSON file: ``rows``, ``out`` (a file for the results), and either ``config`` (RunHelper starts the servers
of it first) or ``head`` (host and port of a head server that runs already). ``out`` gets a list of {row, result} in the
order of the rows; a rollout that raised has ``error`` instead. Nothing of gymloop is imported here.
"""

import asyncio
import json
import sys
import time
from pathlib import Path

RAY_S = 300.0
AGENT_PORTS = ("metrics_agent_port", "metrics_export_port", "dashboard_agent_listen_port", "runtime_env_agent_port")


def patient_ray():
    """Let the Ray that RunHelper always starts, and that plays no part here, come up on a loaded machine.

    Its node kills itself where agents have not written their ports into files within 15 s, so they are written before
    it starts; and its driver gives up on the node after 30 s. The dashboard's packages, which make an agent large, are
    left out.
    """
    import socket

    import ray._private.node as node
    import ray._private.parameter as parameter
    import ray._private.services as services
    import ray._private.utils as utils
    from ray._raylet import persist_port

    utils.get_dashboard_dependency_error = lambda: ImportError("left out")
    made, asked, started = parameter.RayParams.__init__, services.get_node, node.Node.start_raylet

    def with_ports(self, *args, **kwargs):
        made(self, *args, **kwargs)
        for name in ("dashboard_agent_listen_port", "runtime_env_agent_port"):
            with socket.create_server(("127.0.0.1", 0)) as free:
                setattr(self, name, free.getsockname()[1])

    def start_raylet(self, *args, **kwargs):
        ports = self._ray_params
        for name in AGENT_PORTS:  # a small agent has no metrics, which it writes as -1
            port = -1 if name.startswith("metrics") else getattr(ports, name)
            persist_port(self.get_session_dir_path(), self.node_id, name, port)
        return started(self, *args, **kwargs)

    def get_node(*args, **kwargs):
        until = time.monotonic() + RAY_S
        while True:
            try:
                return asked(*args, **kwargs)
            except RuntimeError:
                if time.monotonic() > until:
                    raise
                time.sleep(0.2)

    parameter.RayParams.__init__ = with_ports
    services.get_node = get_node
    node.Node.start_raylet = start_raylet


async def collect(rows, head):
    from nemo_gym.rollout_collection import RolloutCollectionHelper
    from nemo_gym.server_utils import BaseServerConfig, get_global_aiohttp_client

    found = {}
    helper = RolloutCollectionHelper()
    for future in helper.run_examples(
        rows, head_server_config=BaseServerConfig(**head), route_failures_to_sidecar=True
    ):
        row, result = await future
        found[row["_ng_task_index"], row["_ng_rollout_index"]] = {"row": row, "result": result}
    await get_global_aiohttp_client().close()
    return [found[row["_ng_task_index"], row["_ng_rollout_index"]] for row in rows]


def main():
    wish = json.loads(Path(sys.argv[1]).read_text())
    helper, head = None, wish.get("head")
    try:
        if head is None:
            from nemo_gym.cli.env import RunHelper
            from nemo_gym.global_config import GlobalConfigDictParserConfig
            from omegaconf import OmegaConf

            patient_ray()
            config = wish["config"]
            helper = RunHelper()
            given = OmegaConf.create(config)
            helper.start(
                GlobalConfigDictParserConfig(
                    initial_global_config_dict=given, skip_load_from_cli=True, skip_load_from_dotenv=True
                )
            )
            head = dict(config["head_server"])
        Path(wish["out"]).write_text(json.dumps(asyncio.run(collect(wish["rows"], head))))
    finally:
        if helper is not None:
            helper.shutdown()


if __name__ == "__main__":
    main()
