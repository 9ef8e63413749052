"""The process that compiles for cards answers each step with that step's bytes."""

import pickle

import pytest

from keras_remat.backends.xla import card_compiler
from keras_remat.backends.xla.card_compiler import CardCompiler
from keras_remat.cards.table import card
from keras_remat.core import interpreter
from keras_remat.errors import UnsupportedModelError

#: Stands for the process: of a step it says that it takes as many bytes as its module has.
ANSWERS = """
import pickle, sys
from keras_remat.backends.xla.card_compiler import CardStep
while True:
    _, module = pickle.load(sys.stdin.buffer)
    answer = pickle.dumps(CardStep(temp_size_in_bytes=len(module), text=1000 * "text"))
    sys.stdout.buffer.write(answer[: len(answer) // 2 if module == b"half" else None])
    sys.stdout.buffer.flush()
    if module == b"half":
        sys.exit(7)
"""


@pytest.fixture
def compiler(monkeypatch):
    def start(*_, **options):
        return started("-c", ANSWERS, **options)

    started = interpreter.start
    monkeypatch.setattr(interpreter, "start", start)
    monkeypatch.setattr(card_compiler, "check_card_compiler", lambda: None)
    return CardCompiler()


def test_after_an_interrupted_step_the_next_one_gets_its_own_answer(compiler, monkeypatch):
    def interrupted(stream):
        raise KeyboardInterrupt

    assert compiler.compiled(b"one", card("T4")).added_bytes == 3
    with monkeypatch.context() as patch:
        patch.setattr(pickle, "load", interrupted)
        with pytest.raises(KeyboardInterrupt):
            compiler.compiled(b"interrupted", card("T4"))
    assert compiler.compiled(b"next", card("T4")).added_bytes == 4


def test_a_process_that_ends_in_the_middle_of_an_answer_is_reported(compiler):
    with pytest.raises(UnsupportedModelError, match="ended with 7"):
        compiler.compiled(b"half", card("T4"))
    assert compiler.compiled(b"next", card("T4")).added_bytes == 4
