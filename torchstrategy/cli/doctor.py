"""``torchstrategy doctor``: what a job would see here, and what is wrong with it."""

from __future__ import annotations

import argparse
import sys
from itertools import chain

from torchstrategy.base.job import Job
from torchstrategy.cli.collective_checks import check_backends_here, check_whole_job
from torchstrategy.cli.host import Host
from torchstrategy.cli.host_checks import (
    check_backends,
    check_cores,
    check_gpus,
    check_open_files,
    check_patches,
    check_shared_memory,
    check_tpus,
    check_versions,
)
from torchstrategy.cli.job_checks import (
    check_addresses,
    check_both_sources,
    check_store,
    check_stray_variables,
    detect,
)
from torchstrategy.cli.network_checks import check_host_name, check_interface_settings, check_proxies
from torchstrategy.cli.report import Finding, as_json, as_text, has_failed

__all__ = ["add_arguments", "examine", "run"]

_TIMEOUT_S = 60.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``torchstrategy doctor``.

    Args:
        parser: gets them.
    """
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--quick", action="store_true", help="start no processes, so no collectives")
    kind.add_argument("--join", action="store_true", help="a collective with all ranks of the job that runs this")
    text = f"for each collective, default {_TIMEOUT_S:g}"
    parser.add_argument("--timeout", type=float, default=_TIMEOUT_S, metavar="SECONDS", help=text)


def run(options: argparse.Namespace) -> int:
    """Examine this host and print the report; ranks of a job other than the first print only what is wrong.

    Args:
        options: what ``add_arguments`` declares.

    Returns:
        1 if something will break a job, else 0.
    """
    host = Host()
    job, findings = examine(host)
    if options.join:
        findings += check_whole_job(job, options.timeout)
    elif not options.quick:
        findings += check_backends_here(host, options.timeout)
    if options.join and job is not None and job.rank > 0:
        wrong = [finding for finding in findings if finding.status in ("warn", "FAIL")]
        sys.stderr.write(f"rank {job.rank}:\n{as_text(wrong)}" if wrong else "")
    else:
        sys.stdout.write(as_json(findings) if options.json else as_text(findings))
    return int(has_failed(findings))


def examine(host: Host) -> tuple[Job | None, list[Finding]]:
    """Make all checks that start nothing.

    Args:
        host: this host.

    Returns:
        The job that was found, and the report.
    """
    job, findings = detect(host)
    findings += chain(
        check_stray_variables(host, job),
        check_both_sources(host),
        check_addresses(host, job),
        check_store(host, job),
        check_versions(host),
        check_backends(host),
        check_cores(host, job),
        check_shared_memory(host),
        check_open_files(host, job),
        check_gpus(host, job),
        check_tpus(host, job),
        check_host_name(host, job),
        check_interface_settings(host),
        check_proxies(host),
        check_patches(),
    )
    return job, findings
