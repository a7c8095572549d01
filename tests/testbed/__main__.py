"""Command line of the testbed: `python -m testbed up`, `down`, `status`, `shape` and more."""

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path

# `python tests/testbed` puts this folder on the path, `python -m testbed` its parent; both shall work.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from testbed import cluster
from testbed.binaries import ensure_binaries, ensure_packages
from testbed.errors import TestbedError
from testbed.spec import plan_cluster


def main(arguments: list[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    try:
        command: Callable[[argparse.Namespace], None] = options.command
        command(options)
    except (TestbedError, TimeoutError) as error:
        print(f"testbed: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("testbed: interrupted; `down` clears away what was started", file=sys.stderr)
        return 130
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="testbed", description="A real Kubernetes of several nodes, as processes on this host."
    )
    commands = parser.add_subparsers(required=True)

    def add(name: str, command: Callable[[argparse.Namespace], None], text: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=text, description=text)
        sub.set_defaults(command=command)
        return sub

    up = add("up", _up, "start it, or find it running")
    up.add_argument("--nodes", type=int, help="how many nodes (2)")
    up.add_argument("--gpus", default="", metavar="node0=1,node1=2", help="pretended GPUs")
    up.add_argument(
        "--label", action="append", default=[], metavar="node0:key=value", help="a node label; repeat it"
    )
    add("down", lambda _: cluster.down(), "end it and leave nothing behind")
    status = add("status", _status, "show nodes, processes, limits")
    status.add_argument("--output", choices=("text", "json"), default="text")
    shape = add("shape", _shape, "limit the speed of a node's network")
    shape.add_argument("node")
    shape.add_argument("rate", help="such as 50mbit, or `clear`")
    gpus = add("gpus", _gpus, "change the number of pretended GPUs of a node")
    gpus.add_argument("node")
    gpus.add_argument("count", type=int)
    power = add("power", _power, "end a node as if it lost power, or start it again")
    power.add_argument("node")
    power.add_argument("state", choices=("off", "on"))
    cable = add("cable", _cable, "pull a node's network cable out, or plug it in")
    cable.add_argument("node")
    cable.add_argument("state", choices=("out", "in"))
    load = add("load-image", _load_image, "load an OCI or Docker archive into the nodes")
    load.add_argument("archive", type=Path)
    load.add_argument("--node", help="one node only")
    add("build", lambda _: _build(), "build and install what a testbed needs, start nothing")
    return parser


def _up(options: argparse.Namespace) -> None:
    # Without words about the shape any healthy testbed will do.
    asked = options.nodes is not None or options.gpus or options.label
    spec = plan_cluster(options.nodes or 2, options.gpus, tuple(options.label)) if asked else None
    testbed = cluster.ensure_up(spec)
    print(f"export KUBECONFIG={testbed.kubeconfig}")
    print(f"export PATH={cluster.programs_folder()}:$PATH")


def _status(options: argparse.Namespace) -> None:
    state = cluster.status()
    if options.output == "json":
        print(json.dumps(state, indent=2))
        return
    if not state["running"]:
        print("not running")
        return
    print("healthy" if state["healthy"] else "NOT healthy", f"(kubeconfig {state['kubeconfig']})")
    for node in state["nodes"]:
        ready = "Ready" if node["ready"] else "NotReady"
        print(
            f"  {node['name']:8} {node['ip']:14} {ready:9} GPUs {node['gpus']}"
            f"  limit {node['shape'] or 'none'}"
        )
    for process in state["processes"]:
        if not process["alive"]:
            print(f"  {process['name']} has ended, see {state['root']}/logs/{process['name']}.log")


def _shape(options: argparse.Namespace) -> None:
    cluster.running().shape(options.node, None if options.rate == "clear" else options.rate)


def _gpus(options: argparse.Namespace) -> None:
    if options.count < 0:
        raise TestbedError(f"gpus {options.count}: a node has 0 or more")
    cluster.running().set_gpus(options.node, options.count)


def _power(options: argparse.Namespace) -> None:
    testbed = cluster.running()
    if options.state == "off":
        testbed.power_off(options.node)
    else:
        testbed.power_on(options.node)


def _cable(options: argparse.Namespace) -> None:
    cluster.running().connect(options.node, options.state == "in")


def _load_image(options: argparse.Namespace) -> None:
    cluster.running().load_image(options.archive, options.node)


def _build() -> None:
    ensure_packages()
    ensure_binaries()


if __name__ == "__main__":
    sys.exit(main())
