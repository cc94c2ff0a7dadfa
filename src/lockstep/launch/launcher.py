"""From a command to supervised processes and the exit code of the run."""

from __future__ import annotations

import gc
import logging
import os
import signal
import socket
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from torch.distributed import DistError
from torch.distributed.elastic.agent.server.api import WorkerSpec
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousParameters
from torch.distributed.elastic.rendezvous import registry as rendezvous
from torch.distributed.elastic.rendezvous.api import RendezvousError
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import DEFAULT_PORT, C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint
from torch.distributed.launcher.api import LaunchConfig, _get_addr_and_port

from lockstep.comm.preflight import Deadline, within
from lockstep.comm.pulse import NONE
from lockstep.errors import LaunchError
from lockstep.launch.agent import Agent
from lockstep.launch.job import Launch
from lockstep.launch.loopback import LoopbackRendezvous
from lockstep.launch.meeting import Machine, Meeting, find_channel
from lockstep.launch.processes import adopting_orphans, environment, refuse_few_files
from lockstep.launch.start_port import PortForEachStart
from lockstep.launch.starter import Starter
from lockstep.launch.stop_signals import STARTING, StoppedEarly, StopSignals
from lockstep.launch.words import say
from lockstep.launch.worker import AGENT_PID, INTERRUPTED, REQUEUE, stop_signals

LOOPBACK = "loopback"  # our own rendezvous, among torch's backends
SIGNALS = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR1")
_CLOSE_S = 10.0  # for the rendezvous to be closed: a store answers in milliseconds, or is cut off


def local_config(processes: int, folder: Path) -> LaunchConfig:
    """Workers of this machine alone, output prefixed with the rank, files in `folder`. Raises: ConfigError."""
    refuse_few_files(processes)
    return LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=processes,
        rdzv_backend=LOOPBACK,
        logs_specs=DefaultLogsSpecs(log_dir=str(folder), tee=Std.ERR),
        log_line_prefix_template="[rank ${rank}] ",
        signals_to_handle=",".join(SIGNALS),
    )


def launch(job: Launch, settle: Callable[[], None] = lambda: None) -> int:
    """Run `job`; return the exit code of the run. settle: called when it is known, and signals are still caught.

    Blocks until every process has ended, whatever happens; none is left behind. Signals are passed on once and give the
    ranks time to save; a second one kills them.
    """
    silence_torch()
    job.supervision.log.begin()
    gc.freeze()  # or the interpreter walks all that torch has made once more when it ends, for a second
    asking = map(str.strip, job.config.signals_to_handle.split(","))
    numbers = stop_signals(signal.Signals[name] for name in asking if name)
    variables = {AGENT_PID: str(os.getpid()), "TORCHELASTIC_SIGNALS_TO_HANDLE": job.config.signals_to_handle}
    with environment(variables), adopting_orphans() as is_adopting, StopSignals(numbers) as signals:
        starter = Starter(
            job.program,
            modules=job.modules,
            is_warm=job.is_warm and is_adopting and job.config.numa_options is None,
            wait=signals.wait_for_one,
            say=say,
            server=job.server,
        )
        try:
            code = _supervise(job, starter, signals)
        except LaunchError as error:  # its message says all
            say(str(error))
            code = 1
        except (RendezvousError, DistError) as error:
            say(f"{type(error).__name__}: {error}")
            code = 1
        finally:
            starter.close()
            settle()
    job.supervision.log.over(code)
    return code


def _supervise(job: Launch, starter: Starter, signals: StopSignals) -> int:
    config = job.config
    parameters = RendezvousParameters(
        config.rdzv_backend,
        config.rdzv_endpoint,
        config.run_id or "none",
        config.min_nodes,
        config.max_nodes,
        config.local_addr,
        **config.rdzv_configs,
    )
    agent, handler, meeting = None, None, None
    try:
        meeting = signals.wait_aside(lambda: _meeting(job, parameters))
        handler = signals.wait_aside(lambda: _rendezvous(job, parameters, meeting))
        agent = Agent(job, _spec(job, parameters, handler), starter, signals, meeting)
        result = agent.run()
        return agent.exit_code if result is not None else 0  # None: this machine was one too many
    except StoppedEarly:
        say(STARTING)
        if agent is not None:
            agent.leave_early()
        newest = job.supervision.newest() if agent is None else agent.newest
        return INTERRUPTED if newest in (None, NONE) else REQUEUE
    finally:
        is_over = not signals.count and (agent is None or agent.exit_code not in (REQUEUE, INTERRUPTED))
        is_cut_off = agent is not None and agent.is_cut_off
        if handler is not None and is_over and not is_cut_off:  # or no other machine could join later
            with suppress(Deadline, DistError):  # where nothing comes back from the store, or it has gone first
                within(_CLOSE_S, handler.shutdown)


def _spec(job: Launch, parameters: RendezvousParameters, handler: RendezvousHandler) -> WorkerSpec:
    config = job.config
    address, port = (None, None) if config.rdzv_backend == LOOPBACK else _get_addr_and_port(parameters)
    return WorkerSpec(
        role=config.role,
        local_world_size=config.nproc_per_node,
        entrypoint=job.program.name,
        args=job.program.arguments,
        rdzv_handler=handler,
        max_restarts=config.max_restarts,
        monitor_interval=config.monitor_interval,
        master_addr=address,
        master_port=port,
        local_addr=config.local_addr,
        event_log_handler=config.event_log_handler,
        numa_options=config.numa_options,
        duplicate_stdout_filters=config.duplicate_stdout_filters,
        duplicate_stderr_filters=config.duplicate_stderr_filters,
        virtual_local_rank=config.virtual_local_rank,
    )


def _meeting(job: Launch, parameters: RendezvousParameters) -> Meeting | None:
    """Where the machines meet; None where there is one, or torch's rendezvous alone knows. Raises: LaunchError."""
    config, settings = job.config, parameters.config
    is_tcp = config.rdzv_backend == "static" or parameters.get("store_type", "tcp").strip().lower() == "tcp"
    if config.rdzv_backend not in ("static", "c10d") or not is_tcp:
        return None
    host, port = parse_rendezvous_endpoint(parameters.endpoint, DEFAULT_PORT)
    if port == 0:  # whichever is free: for one machine
        return None
    is_static, least, most = config.rdzv_backend == "static", config.min_nodes, config.max_nodes
    number = int(settings["rank"]) if is_static else None
    mine = Machine(
        run=parameters.run_id,
        nnodes=f"{most}" if is_static or least == most else f"{least}:{most}",
        node_rank=number,
        processes=config.nproc_per_node,
        host=socket.gethostname(),
        pid=os.getpid(),
    )
    limit_s = float(parameters.get_as_int("timeout" if is_static else "join_timeout", 600) or 600)
    is_host = number == 0 if is_static else parameters.get_as_bool("is_host")
    channel = find_channel(host, port, mine, is_host, limit_s, say)
    return Meeting(channel, mine, least, most, limit_s, say)


def _rendezvous(job: Launch, parameters: RendezvousParameters, meeting: Meeting | None) -> RendezvousHandler:
    if job.config.rdzv_backend == LOOPBACK:
        return LoopbackRendezvous(job.config.run_id, job.port)
    if job.config.rdzv_backend == "c10d" and meeting is not None:
        store = meeting.channel.store
        backend = C10dRendezvousBackend(store, parameters.run_id)
        return PortForEachStart(create_handler(store, backend, parameters))
    try:
        handler = rendezvous.get_rendezvous_handler(parameters)
    except (ImportError, ValueError) as error:
        raise LaunchError(f"--rdzv-backend {job.config.rdzv_backend}: {error}") from error
    return handler if job.config.rdzv_backend == "static" else PortForEachStart(handler)  # static: that of the user


def silence_torch() -> None:
    """torch's launcher says nothing, unless LOGLEVEL asks it to: what matters is said in our own words."""
    if "LOGLEVEL" not in os.environ:
        for name in list(logging.root.manager.loggerDict):
            if name.startswith("torch.distributed."):
                logging.getLogger(name).setLevel(logging.CRITICAL)
