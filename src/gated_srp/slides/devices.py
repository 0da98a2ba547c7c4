"""Slides shared out over processes, each with an accelerator of its own; on a processor they share its cores."""

import pickle
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from gated_srp.errors import UserError
from gated_srp.progress import Event, Progress
from gated_srp.slides.encoders import Encoder, find_encoder
from gated_srp.slides.extract import Extraction, Outcome, best_device, extract_slides
from gated_srp.slides.lists import refuse_same_names

_reports: Any = None  # of a process: where it says how far it is


def extract_on_devices(
    slides: Sequence[Path], settings: Extraction, encoder: str | Encoder, devices: int, progress: Progress
) -> Outcome:
    """As `extract_slides`, every slide in one of ``devices`` processes; ``encoder`` as it was named, since one made here may not travel."""
    refuse_same_names(slides)
    if torch.accelerator.is_available() and devices > torch.accelerator.device_count():
        there = torch.accelerator.device_count()
        raise UserError(
            f"{devices}, but there are {there} accelerators", where="devices", cure=f"Ask for {there} at most."
        )
    sent = replace(settings, encoder=None, workers=max(1, settings.workers // devices) if settings.workers else 0)  # type: ignore[arg-type]
    try:
        pickle.dumps(encoder)
    except (pickle.PicklingError, AttributeError, TypeError):
        cure = "Name it as package.module:function."
        raise UserError("an encoder made here cannot be given to other processes", where="encoder", cure=cure) from None
    context = get_context("spawn")
    reports = context.SimpleQueue()
    parts = [list(slides[number::devices]) for number in range(devices)]
    with ProcessPoolExecutor(devices, mp_context=context, initializer=_begin, initargs=(reports,)) as pool:
        futures = [pool.submit(_part, number, part, sent, encoder) for number, part in enumerate(parts)]
        finished = 0
        while True:
            done = not wait(futures, timeout=0.2).not_done
            while not reports.empty():
                event = reports.get()
                if event.stage == "slides":  # each process counts its own
                    finished += 1
                    event = replace(event, done=finished, total=len(slides))
                progress(event)
            if done:
                break
        try:
            outcomes = [future.result() for future in futures]
        except BrokenProcessPool as error:
            cure = "Start the same command again with fewer devices or workers."
            what = "a process was ended from outside, most likely for lack of memory. Slides finished before are kept"
            raise UserError(what, cure=cure, kind="worker_lost") from error
    for other in outcomes[1:]:
        outcomes[0].join(other)
    return outcomes[0]


def _begin(reports: Any) -> None:
    global _reports
    _reports = reports


def _part(number: int, slides: list[Path], settings: Extraction, encoder: str | Encoder) -> Outcome:
    """In one of the processes."""
    device = best_device()
    if device.type != "cpu":
        device = torch.device(device.type, number)
        torch.accelerator.set_device_index(number)
    spec = find_encoder(encoder) if isinstance(encoder, str) else encoder

    def report(event: Event) -> None:
        if event.stage == "slides":  # patches of several slides at once would be no progress to look at
            _reports.put(event)

    return extract_slides(slides, replace(settings, encoder=spec, device=device), report)
