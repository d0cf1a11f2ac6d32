"""One process of the comparison in `peers.py`: runs rounds of one framework on request.

    python benchmarks/speed/frameworks.py NAME FOLDER        NAME is a framework, with -off for torch without oneDNN

FOLDER has the common inputs: `work.json` (model, learning rate, batch), `x.npy` and `y.npy`, `first.npz` (the initial
weights), `cohorts.npy` (rounds, clients) and `orders.npy` (rounds, clients, examples): the order of the examples. A
line on standard input starts a round; the response on standard output is one line of JSON. The weights after the first
round are written to `FOLDER/after-NAME.npz`. Only "ours" needs thinwire; each other framework needs only its own
package.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import numpy as np

Weights = dict[str, np.ndarray]
RESPONSES: IO[str] = sys.stdout
CLIENTS = 100
# channels, size, convolutions, hidden
SHAPES: dict[str, tuple[int, int, tuple[int, ...], int]] = {
    "cnn2": (1, 28, (8, 16), 0),
    "cnn-cifar": (3, 32, (64, 128, 128), 256),
}


class Work:
    """The common inputs, and the connection to the parent process."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self.folder = name, folder
        facts = json.loads((folder / "work.json").read_text())
        self.model: str = facts["model"]
        self.lr: float = facts["lr"]
        self.batch: int = facts["batch"]
        self.x, self.y = np.load(folder / "x.npy"), np.load(folder / "y.npy")
        self.first: Weights = dict(np.load(folder / "first.npz"))
        self.cohorts, self.orders = np.load(folder / "cohorts.npy"), np.load(folder / "orders.npy")

    def play(self, one_round: Callable[[int], tuple[int, Callable[[], Weights], str]]) -> None:
        """Run all rounds; each gives its steps, a function that returns the weights, and a note."""
        for number in range(len(self.cohorts)):
            if not self.wait():
                return
            began, cpu = time.perf_counter(), time.process_time()
            steps, weights, note = one_round(number)
            self.report(number, time.perf_counter() - began, steps, weights, note, time.process_time() - cpu)

    def wait(self) -> bool:
        """Wait for the next request; False if there is none."""
        self.write({"ready": self.name})
        return bool(sys.stdin.readline().strip())

    def report(
        self, number: int, seconds: float, steps: int, weights: Callable[[], Weights], note: str, cpu: float = 0.0
    ) -> None:
        """Report a round, and write the weights after the first."""
        if number == 0:
            np.savez(self.folder / f"after-{self.name}.npz", **weights())
        self.write(
            {"round": number, "seconds": seconds, "cpu": cpu, "steps": steps, "note": note} | {"peak_mb": peak_mb()}
        )

    def write(self, what: dict[str, Any]) -> None:
        """Write one line of JSON."""
        RESPONSES.write(json.dumps(what) + "\n")
        RESPONSES.flush()


def peak_mb() -> float:
    """The most memory that this process had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3


# -- shared by frameworks based on torch -------------------------------------------------------------------------------


def torch_model(work: Work) -> Any:
    """The network in plain torch, with the initial weights."""
    import torch
    from torch import nn

    channels, size, widths, hidden = SHAPES[work.model]
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    for i, width in enumerate(widths, start=1):
        layers[f"conv{i}"] = nn.Conv2d(channels, width, 5, padding=2)
        layers[f"relu{i}"], layers[f"pool{i}"] = nn.ReLU(), nn.AvgPool2d(2)
        channels = width
    layers["flatten"] = nn.Flatten()
    fan = channels * (size >> len(widths)) ** 2
    if hidden:
        layers["hidden"], layers["relu"] = nn.Linear(fan, hidden), nn.ReLU()
        fan = hidden
    layers["head"] = nn.Linear(fan, 10)
    model = nn.Sequential(layers)
    model.load_state_dict({name: torch.from_numpy(value.copy()) for name, value in work.first.items()})
    return model


def as_numpy(tensors: dict[str, Any]) -> Weights:
    """Copies of tensors."""
    return {name: value.detach().numpy().copy() for name, value in tensors.items()}


def use_onednn(work: Work) -> str:
    """Disable oneDNN if the name ends in -off."""
    import torch

    if work.name.endswith("-off"):
        torch.backends.mkldnn.enabled = False  # type: ignore[assignment]
    return f"torch {torch.__version__}, {torch.get_num_threads()} threads"


def train(model: Any, x: Any, y: Any, work: Work) -> int:
    """Train a client for one epoch; returns the number of steps."""
    import torch
    from torch.nn.functional import cross_entropy

    optimizer = torch.optim.SGD(model.parameters(), work.lr)
    steps = 0
    for start in range(0, len(x), work.batch):
        optimizer.zero_grad(set_to_none=True)
        cross_entropy(model(x[start : start + work.batch]), y[start : start + work.batch]).backward()
        optimizer.step()
        steps += 1
    return steps


# -- the frameworks ----------------------------------------------------------------------------------------------------


def loop(work: Work) -> None:
    """The plain loop: one model, one client after another, all cores within a step."""
    import torch

    note = use_onednn(work)
    last = work.name.endswith("channels-last")
    model = torch_model(work).train()
    if last:
        model = model.to(memory_format=torch.channels_last)
    x, y = torch.from_numpy(work.x), torch.from_numpy(work.y)
    now = {name: value.clone() for name, value in model.state_dict().items()}

    def one_round(number: int) -> tuple[int, Callable[[], Weights], str]:
        nonlocal now
        total = {name: torch.zeros_like(value) for name, value in now.items()}
        steps = 0
        for order in torch.from_numpy(work.orders[number]):
            model.load_state_dict(now)
            mine = x[order].contiguous(memory_format=torch.channels_last) if last else x[order]
            steps += train(model, mine, y[order], work)
            for name, value in model.state_dict().items():
                total[name] += value / len(work.orders[number])
        now = total
        return steps, lambda: as_numpy(now), note

    work.play(one_round)


def job_of(model: str, lr: float, batch: int, cohort: int, folder: Path) -> Any:
    """The work as a job of thinwire."""
    import torch

    from thinwire.core.registry import lookup
    from thinwire.data.examples import Arrays
    from thinwire.data.partition import Assignment
    from thinwire.data.task import Task
    from thinwire.federation.job import Job
    from thinwire.optimizers import SGD
    from thinwire.protocol import Method
    from thinwire.training import Local

    torch.manual_seed(0)
    x, y = (torch.from_numpy(np.load(folder / name)) for name in ("x.npy", "y.npy"))
    each = len(x) // CLIENTS
    dealt = Assignment(np.arange(len(x)), np.arange(CLIENTS + 1) * each)
    task = Task(lookup("model", model).make(), Arrays(x, y), dealt)
    return Job(task, Method(client_opt=SGD(lr)), 10**6, cohort, Local(batch=batch), eval_every=10**6)


def ours(work: Work) -> None:
    """Complete rounds of thinwire: training, messages and server."""
    import torch

    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    from thinwire.federation.engine import Engine
    from thinwire.federation.simulation import make_simulation

    simulation = make_simulation(
        Engine("cpu"), job_of(work.model, work.lr, work.batch, len(work.cohorts[0]), work.folder)
    )
    state = simulation.start()

    def one_round(number: int) -> tuple[int, Callable[[], Weights], str]:
        nonlocal state
        state, _ = simulation.round(state)
        if state.cohort != tuple(work.cohorts[number].tolist()):
            raise SystemExit("the cohort differs from that of the other frameworks")
        steps = sum(simulation.sampler.workload(number, state.cohort).steps)
        note = f"torch {torch.__version__}, {state.backend}"
        return steps, lambda: as_numpy(simulation.weights(state.server.public)), note

    work.play(one_round)


def pfl(work: Work) -> None:
    """pfl's simulated backend in one process, as in its benchmarks."""
    import torch
    from pfl.aggregate.simulate import SimulatedBackend
    from pfl.algorithm.base import NNAlgorithmParams
    from pfl.algorithm.federated_averaging import FederatedAveraging
    from pfl.callback.base import TrainingProcessCallback
    from pfl.data.dataset import Dataset
    from pfl.data.federated_dataset import FederatedDataset
    from pfl.hyperparam import NNTrainHyperParams
    from pfl.metrics import Metrics
    from pfl.model.pytorch import PyTorchModel
    from torch.nn.functional import cross_entropy

    note = use_onednn(work)
    x, y = torch.from_numpy(work.x), torch.from_numpy(work.y)
    orders = torch.from_numpy(work.orders)
    counted = [0]

    class Counted(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            counted[0] += 1
            return super().step(closure)

    model = torch_model(work)

    def loss(x: Any, y: Any, eval: bool = False) -> Any:
        model.train()
        return cross_entropy(model(x), y)

    model.loss, model.metrics = loss, lambda x, y, eval=False: {}  # type: ignore[assignment]
    users = iter([(r, i) for r in range(len(orders)) for i in range(orders.shape[1])])

    def dataset(user: tuple[int, int]) -> Any:
        order = orders[user]
        return Dataset([x[order], y[order]], user_id=str(user))

    class Rounds(TrainingProcessCallback):
        def begin(self) -> bool:
            go = work.wait()
            self.began, self.cpu, counted[0] = time.perf_counter(), time.process_time(), 0
            return not go

        def on_train_begin(self, *, model: Any) -> Any:
            self.begin()
            return Metrics()

        def after_central_iteration(self, aggregate_metrics: Any, model: Any, *, central_iteration: int) -> Any:
            seconds, cpu = time.perf_counter() - self.began, time.process_time() - self.cpu
            trained = model.pytorch_model
            work.report(central_iteration, seconds, counted[0], lambda: as_numpy(trained.state_dict()), note, cpu)
            return central_iteration + 1 == len(orders) or self.begin(), Metrics()

    params = NNAlgorithmParams(
        central_num_iterations=len(orders),
        evaluation_frequency=10**9,
        train_cohort_size=orders.shape[1],
        val_cohort_size=0,
    )
    backend = SimulatedBackend(FederatedDataset(dataset, lambda: next(users)), None)
    wrapped = PyTorchModel(model, Counted, torch.optim.SGD(model.parameters(), 1.0))
    local = NNTrainHyperParams(local_num_epochs=1, local_learning_rate=work.lr, local_batch_size=work.batch)
    FederatedAveraging().run(params, backend, wrapped, local, None, [Rounds()])


def usable_cores() -> int:
    """The number of cores that this process may use; where the system does not say, all of them."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def flower(work: Work) -> None:
    """Flower's simulation on Ray: one actor per core."""
    os.environ |= {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1", "RAY_USAGE_STATS_ENABLED": "0"}
    import ray
    import torch
    from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
    from flwr.clientapp import ClientApp
    from flwr.serverapp import Grid, ServerApp
    from flwr.serverapp.strategy import FedAvg
    from flwr.simulation import run_simulation

    cores = usable_cores()
    note = f"torch {torch.__version__}, ray {ray.__version__}, {cores} actors"
    name, folder, here = work.name, str(work.folder), str(Path(__file__).resolve().parent)
    client, server = ClientApp(), ServerApp()

    @client.train()
    def fit(message: Message, context: Context) -> Message:
        sys.path[:0] = [here] * (here not in sys.path)
        from frameworks import actor  # type: ignore[import-not-found]

        mine, model, x, y = actor(name, folder)
        model.load_state_dict(message.content["arrays"].to_torch_state_dict())
        config = message.content["config"]
        order = torch.from_numpy(mine.orders[config["round"], config["place"]])
        steps = train(model, x[order], y[order], mine)
        metrics = MetricRecord({"num-examples": len(order), "steps": steps})
        content = RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics})
        return Message(content, reply_to=message)

    class Timed(FedAvg):
        def configure_train(self, server_round: int, arrays: Any, config: Any, grid: Grid) -> Any:
            if not work.wait():
                ray.shutdown()
                os._exit(0)  # otherwise Flower starts its next round
            self.began = time.perf_counter()
            messages = list(super().configure_train(server_round, arrays, config, grid))
            for place, message in enumerate(messages):
                config = ConfigRecord({"round": server_round - 1, "place": place})
                message.content = RecordDict({"arrays": arrays, "config": config})
            return messages

        def aggregate_train(self, server_round: int, replies: Any) -> Any:
            replies = list(replies)
            steps = sum(reply.content["metrics"]["steps"] for reply in replies if not reply.has_error())
            arrays, metrics = super().aggregate_train(server_round, replies)
            seconds = time.perf_counter() - self.began
            work.report(server_round - 1, seconds, steps, lambda: as_numpy(arrays.to_torch_state_dict()), note)
            return arrays, metrics

    @server.main()
    def main(grid: Grid, context: Context) -> None:
        count = work.orders.shape[1]
        strategy = Timed(1e-9, 0.0, min_train_nodes=count, min_available_nodes=100)
        first = ArrayRecord({key: Array(value) for key, value in work.first.items()})
        strategy.start(grid, first, num_rounds=len(work.orders))

    resources = {"client_resources": {"num_cpus": 1, "num_gpus": 0.0}, "init_args": {"num_cpus": cores}}
    run_simulation(server, client, num_supernodes=100, backend_config=resources)  # type: ignore[arg-type]


_ACTOR: list[Any] = []


def actor(name: str, folder: str) -> Any:
    """State of a Flower actor, kept between clients."""
    if not _ACTOR:
        import torch

        torch.set_num_threads(1)
        work = Work(name, Path(folder))
        use_onednn(work)
        _ACTOR.append((work, torch_model(work).train(), torch.from_numpy(work.x), torch.from_numpy(work.y)))
    return _ACTOR[0]


def fedjax(work: Work) -> None:
    """FedJAX's compiled `for_each_client`, with channels last, the fastest layout on a CPU."""
    import jax
    import jax.numpy as jnp

    jax.tree_map = jax.tree_util.tree_map  # FedJAX 0.0.17 uses the old name
    import fedjax as fj

    widths = SHAPES[work.model][2]
    x = np.ascontiguousarray(work.x.transpose(0, 2, 3, 1))
    note = f"jax {jax.__version__}, jit"

    def to_jax(name: str, value: np.ndarray) -> Any:
        if value.ndim == 4:
            return jnp.asarray(value.transpose(2, 3, 1, 0))
        return jnp.asarray(value.T if value.ndim == 2 else value)

    def to_torch(value: Any) -> np.ndarray:
        value = np.asarray(value)
        return np.ascontiguousarray(value.transpose(3, 2, 0, 1) if value.ndim == 4 else value.T)

    def logits(w: Any, h: Any) -> Any:
        for i in range(1, len(widths) + 1):
            kernel, bias = w[f"conv{i}.weight"], w[f"conv{i}.bias"]
            h = jax.lax.conv_general_dilated(h, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
            h = jax.nn.relu(h + bias)
            h = jax.lax.reduce_window(h, 0.0, jax.lax.add, (1, 2, 2, 1), (1, 2, 2, 1), "VALID") / 4
        h = h.transpose(0, 3, 1, 2).reshape(len(h), -1)  # the linear layer's inputs are in the order of torch
        if "hidden.weight" in w:
            h = jax.nn.relu(h @ w["hidden.weight"] + w["hidden.bias"])
        return h @ w["head.weight"] + w["head.bias"]

    def loss(w: Any, batch: Any) -> Any:
        chosen = jax.nn.log_softmax(logits(w, batch["x"]))
        return -jnp.take_along_axis(chosen, batch["y"][:, None], 1).mean()

    def step(state: Any, batch: Any) -> Any:
        slope = jax.grad(loss)(state["w"], batch)
        moved = jax.tree_util.tree_map(lambda w, g: w - work.lr * g, state["w"], slope)
        return {"w": moved, "steps": state["steps"] + 1}

    run = fj.for_each_client(lambda shared, _: {"w": shared, "steps": jnp.zeros((), jnp.int32)}, step)
    now = {name: to_jax(name, value) for name, value in work.first.items()}

    def batches(order: np.ndarray) -> list[dict[str, np.ndarray]]:
        mine, labels = x[order], work.y[order].astype(np.int32)
        cuts = range(0, len(order), work.batch)
        return [{"x": mine[at : at + work.batch], "y": labels[at : at + work.batch]} for at in cuts]

    def one_round(number: int) -> tuple[int, Callable[[], Weights], str]:
        nonlocal now
        orders = work.orders[number]
        clients = ((str(i).encode(), batches(order), {}) for i, order in enumerate(orders))
        steps, parts = 0, []
        for _, out in run(now, clients):
            parts.append((out["w"], 1.0))
            steps += int(out["steps"])
        now = fj.tree_util.tree_mean(parts)
        jax.block_until_ready(now)
        return steps, lambda: {name: to_torch(value) for name, value in now.items()}, note

    work.play(one_round)


FRAMEWORKS = {"loop": loop, "ours": ours, "pfl": pfl, "flower": flower, "fedjax": fedjax}


def main() -> None:  # noqa: D103
    name, folder = sys.argv[1], Path(sys.argv[2])
    work = Work(name, folder)
    try:
        FRAMEWORKS[name.split("-")[0]](work)
    except ImportError as error:
        work.write({"missing": str(error)})


if __name__ == "__main__":
    # frameworks may print to standard output: responses use the original one, all other output goes to stderr
    RESPONSES = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    main()
