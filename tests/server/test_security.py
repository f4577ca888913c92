"""What must not get out: keys and prompts; and what a stranger's template must not do."""

from __future__ import annotations

import logging

import pytest

from pagestream.engine import EngineArgs, LLMEngine
from pagestream.engine.core.errors import InvalidRequest, StartError
from pagestream.engine.text.chat_template import ChatTemplate
from tests.server.conftest import Live

KEY = "sk-very-secret-4711"
PROMPT = "my grandmother's recipe"


@pytest.mark.parametrize("header", ["Authorization", "X-Api-Key", "Cookie", "Idempotency-Key"])
def test_keys_and_prompts_are_in_no_log_and_in_no_error(start, caplog, header):
    live: Live = start(api_keys=(KEY, "good"))
    value = f"Bearer {KEY}-wrong" if header == "Authorization" else KEY + "-wrong"
    answers = []
    with caplog.at_level(logging.INFO):
        for key in ("good", KEY, "bad"):
            head = {"Authorization": f"Bearer {key}"} | {header: value}
            for fields in (
                {},
                {"temperature": "hot"},
                {"stream": True},
                {"max_tokens": 9999},
                {"x_fault": {"kind": "raise"}},
                {"stream": True, "x_fault": {"kind": "raise", "at_token": 2}},
                {PROMPT: 1},
            ):
                body = {"model": "m", "prompt": PROMPT, "max_tokens": 5, "ignore_eos": True, **fields}
                answers.append(live.client.post("/v1/completions", json=body, headers=head))
    told = " ".join(record.getMessage() + str(record.exc_text or "") for record in caplog.records)
    assert "POST /v1/completions" in told
    for secret in (KEY, PROMPT):
        assert secret not in told
    for answer in answers:
        assert KEY not in answer.text
        assert KEY not in str(answer.headers)


def test_code_that_comes_with_a_model_is_announced(tiny_llama, caplog):
    for trust in (False, True):
        args = EngineArgs(model=str(tiny_llama), num_kv_blocks=8, cpu_threads=1, trust_remote_code=trust)
        with caplog.at_level(logging.WARNING):
            LLMEngine.from_engine_args(args)
        assert any("trust_remote_code" in record.getMessage() for record in caplog.records) is trust


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.__class__ }}",
        "{{ raise_exception.__globals__ }}",
        "{{ messages.append(1) }}",
        "{{ cycler.__init__.__globals__.os.system('true') }}",
        "{% for i in range(10**9) %}{% endfor %}",
        "{% include '/etc/passwd' %}",
        "{% import 'os' as os %}",
        "{{ self._TemplateReference__context }}",
    ],
)
def test_a_template_stays_in_its_box(source):
    try:
        text = ChatTemplate(source).render([{"role": "user", "content": "a"}])
    except (InvalidRequest, StartError):
        return
    # What the sandbox withholds is undefined, and undefined is written as nothing.
    assert text == ""
