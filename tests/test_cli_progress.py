"""One renderer for all commands: bars and tables in a terminal, plain lines in a pipe."""

import io

from rich.console import Console

from gated_srp.cli.screen import show_progress
from gated_srp.progress import Event


def pipe():
    return Console(file=io.StringIO(), width=80)


def terminal():
    return Console(file=io.StringIO(), force_terminal=True, width=80, record=True)


def test_a_pipe_sees_a_count_at_each_tenth():
    console = pipe()
    with show_progress(console) as progress:
        for done in range(1, 41):
            progress(Event("slides", done, 40))
    lines = console.file.getvalue().splitlines()
    assert lines[0] == "slides: 4 of 40" and lines[-1] == "slides: 40 of 40" and len(lines) == 10


def test_texts_of_counted_items_are_lines_and_inner_counts_are_left_out():
    console = pipe()
    with show_progress(console) as progress:
        progress(Event("patches", 5, 10, text="a.svs"))
        progress(Event("slides", 1, 2, text="a.svs: 10 patches [x]"))
        progress(Event("bags", 1, 10, text="epoch 1"))
    assert console.file.getvalue() == "a.svs: 10 patches [x]\n"


def test_a_text_that_changes_all_the_time_is_a_line_now_and_then(monkeypatch):
    clock = iter(range(0, 1000, 20))
    monkeypatch.setattr("gated_srp.cli.screen.time.monotonic", lambda: next(clock))
    console = pipe()
    with show_progress(console) as progress:
        for done in range(3):
            progress(Event("bags", done, 10, text=f"epoch {done}"))
    assert console.file.getvalue() == "1/10 bags, epoch 1\n"  # after 40 seconds, not after 20 and 60


def test_a_message_is_output(capsys):
    with show_progress(pipe()) as progress:
        progress(Event("run", text="epoch 1/2: loss 0.5"))
    assert capsys.readouterr().out == "epoch 1/2: loss 0.5\n"


def test_a_terminal_has_bars_with_names_counts_and_texts():
    console = terminal()
    with show_progress(console) as progress:
        progress(Event("slides", 1, 2, text="a.svs: 10 patches"))
        progress(Event("patches", 5, 10, text="b.svs"))
        progress(Event("bags", 3, 7, text="epoch 1, loss 0.5"))
        progress._bars.refresh()
    seen = console.export_text()
    assert all(word in seen for word in ("a.svs: 10 patches\n", "slides", "1/2", "b.svs", "5/10", "3/7", "loss 0.5"))
