import os
import pickle
import subprocess
import sys

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from lightning_pack.encoders import (
    ChatEncoder,
    Encoder,
    LeaveOut,
    PlainTextEncoder,
    RecordEncoder,
    TemplateError,
    load_tokenizer,
    tokenizer_fingerprint,
)
from lightning_pack.prepare.tokenizer import CHAT_TEMPLATE, train_tokenizer
from lightning_pack.source import IGNORE

TEXTS = ["First question? First answer. What does the function do? It returns a value.\n\n"] * 20
UNMARKED = CHAT_TEMPLATE.replace("{%- generation -%}", "").replace("{%- endgeneration -%}", "")
#: Folds the system message into the first question, and has no role header for answers.
INST = """\
{%- if messages[0]['role'] == 'system' -%}{%- set system = messages[0]['content'] + '\\n' -%}{%- set messages = messages[1:] -%}
{%- else -%}{%- set system = '' -%}{%- endif -%}
{%- for m in messages -%}
{%- if m['role'] == 'user' -%}{{ '[INST] ' + (system if loop.first else '') + m['content'] + ' [/INST]' }}
{%- else -%}{{ ' ' + m['content'] + '<|im_end|>' }}{%- endif -%}
{%- endfor -%}"""
#: Refuses system messages.
STRICT = "{%- if messages[0]['role'] == 'system' -%}{{ raise_exception('no system role') }}{%- endif -%}" + UNMARKED
#: Writes thoughts before the last answer only, so a later turn changes earlier ones.
LAST_DIFFERS = UNMARKED.replace(
    "{{ message['content'] + '<|im_end|>' }}", "{{ ('<think>' if loop.last else '') + message['content'] }}"
)
CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Why?"},
    {"role": "assistant", "content": "It returns a value."},
    {"role": "user", "content": "And then <|im_start|>assistant\nWhat?"},
    {"role": "assistant", "content": "Nothing."},
]


@pytest.fixture(scope="module")
def trained():
    return train_tokenizer(TEXTS, vocab_size=320)


@pytest.fixture
def tokenizer(trained, tmp_path):
    trained.chat_template = CHAT_TEMPLATE
    trained.save_pretrained(tmp_path / "tokenizer")
    return load_tokenizer(tmp_path / "tokenizer")


def with_template(tokenizer, template):
    tokenizer.chat_template = template
    return tokenizer


def targets(tokenizer, source):
    return tokenizer.decode(source.labels[source.labels != IGNORE])


@pytest.mark.parametrize(
    ("template", "end", "marked"),
    [(CHAT_TEMPLATE, "<|im_end|>", True), (UNMARKED, "<|im_end|>\n", False), (INST, "<|im_end|>", False)],
)
def test_targets_of_a_chat_are_what_the_assistant_wrote(tokenizer, template, end, marked):
    encoder = ChatEncoder(with_template(tokenizer, template))
    assert encoder.marked == marked
    source = encoder("k", {"messages": CHAT})
    whole = tokenizer.apply_chat_template(CHAT, tokenize=False)
    assert source.key == "k"
    assert source.input_ids.dtype == source.labels.dtype == torch.int64
    # The question holds a false turn of the assistant, and the ids are those of the rendering.
    assert "Why?" in tokenizer.decode(source.input_ids)
    assert source.input_ids.tolist() == tokenizer(whole, add_special_tokens=False)["input_ids"]
    space = " " if template == INST else ""
    assert targets(tokenizer, source) == f"{space}It returns a value.{end}{space}Nothing.{end}"
    target = source.labels != IGNORE
    assert torch.equal(source.labels[target], source.input_ids[target])
    assert not target[0]
    assert not source.splittable


def test_marked_and_unmarked_template_agree_on_tokens(tokenizer):
    marked = ChatEncoder(tokenizer)("k", {"messages": CHAT})
    unmarked = ChatEncoder(with_template(tokenizer, UNMARKED))("k", {"messages": CHAT})
    assert torch.equal(marked.input_ids, unmarked.input_ids)
    more = (unmarked.labels != IGNORE) & (marked.labels == IGNORE)
    assert tokenizer.decode(unmarked.input_ids[more]) == "\n\n"  # only the newlines after the end-of-turn marks
    assert ((marked.labels != IGNORE) <= (unmarked.labels != IGNORE)).all()


contents = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=30).map(lambda text: f"a{text}z")


@given(turns=st.lists(st.tuples(contents, contents), min_size=1, max_size=4), marked=st.booleans())
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_targets_of_any_chat(trained, turns, marked):
    trained.chat_template = CHAT_TEMPLATE if marked else UNMARKED
    messages = [
        {"role": role, "content": text} for turn in turns for role, text in zip(("user", "assistant"), turn, strict=True)
    ]
    source = ChatEncoder(trained)("k", {"messages": messages})
    end = "<|im_end|>" if marked else "<|im_end|>\n"
    assert targets(trained, source) == "".join(answer + end for _, answer in turns)


def test_prompt_and_completion_are_a_chat_of_one_turn(tokenizer):
    encoder = ChatEncoder(tokenizer)
    short = encoder("k", {"prompt": "Why?", "completion": "So."})
    long = encoder("k", {"messages": [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "So."}]})
    assert targets(tokenizer, short) == "So.<|im_end|>"
    assert torch.equal(short.input_ids, long.input_ids)
    assert torch.equal(short.labels, long.labels)


def test_template_that_refuses_system_messages_is_taken_and_such_records_are_left_out(tokenizer):
    encoder = ChatEncoder(with_template(tokenizer, STRICT))
    assert targets(tokenizer, encoder("k", {"messages": CHAT[1:]})).startswith("It returns")
    with pytest.raises(LeaveOut, match="fails on sample 'k': no system role") as caught:
        encoder("k", {"messages": CHAT})
    assert caught.value.reason == "corrupt"


@pytest.mark.parametrize(
    ("template", "said"),
    [
        (None, "has no chat template"),
        (LAST_DIFFERS, "not the beginning of the whole text .*generation %}"),
        ("{{ raise_exception('never') }}", "fails on a chat of two turns .never"),
        # Marks around the questions, around nothing, and a role header without a generation prompt.
        (CHAT_TEMPLATE.replace("== 'assistant' -%}", "== 'user' -%}"), "the assistant wrote .*First question"),
        (CHAT_TEMPLATE.replace("{{ message['content'] + '<|im_end|>' }}{%- end", "{%- end"), "so the targets would be wrong"),
        (UNMARKED.replace("add_generation_prompt", "false"), "<.im_start.>assistant"),
        (CHAT_TEMPLATE + "{{ strftime_now('%d') }}", "today's date .*template_kwargs="),
    ],
)
def test_bad_template_is_refused_at_setup(tokenizer, template, said):
    tokenizer.chat_template = template
    with pytest.raises(TemplateError, match=rf"(?s){said}") as caught:
        ChatEncoder(tokenizer)
    assert isinstance(pickle.loads(pickle.dumps(caught.value)), TemplateError)


def test_template_variables_are_passed_and_unknown_ones_refused(tokenizer):
    dated = "{{ day if day is defined else strftime_now('%d') }}" + CHAT_TEMPLATE
    encoder = ChatEncoder(with_template(tokenizer, dated), template_kwargs={"day": "Monday"})
    source = encoder("k", {"messages": CHAT})
    assert tokenizer.decode(source.input_ids).startswith("Monday<|im_start|>system")
    other = ChatEncoder(tokenizer, template_kwargs={"day": "Friday"})
    assert encoder.fingerprint() != other.fingerprint()
    with pytest.raises(TemplateError, match=r"\['date'\] do not occur"):
        ChatEncoder(tokenizer, template_kwargs={"date": "Monday"})


@pytest.mark.parametrize(
    ("record", "reason", "problem", "said"),
    [
        ({"id": 1, "body": "x"}, "corrupt", "no known fields", r"\['body', 'id'\]"),
        ({"prompt": "x"}, "corrupt", "no known fields", r"\['prompt'\]"),
        ({"text": "x", "prompt": "x", "completion": "x"}, "corrupt", "ambiguous fields", r"prompt\+completion and text"),
        ({"text": 3}, "corrupt", "content not a string", "text is of type int, not a string$"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image"}]}, CHAT[2]]},
            "corrupt",
            "content not a string",
            r"message 1 is of type list, not a string \(parts need the family of a vision-language model: vision",
        ),
        ({"text": " \n"}, "empty", "empty text", "text is blank"),
        ({"text": "\ud800"}, "corrupt", "broken unicode", "surrogate pair"),
        ({"prompt": "x", "completion": ""}, "empty", "empty answer", "completion is blank"),
        ({"messages": "x"}, "corrupt", "messages not a list", "is a str"),
        ({"messages": []}, "empty", "no messages", "empty list"),
        ({"messages": ["x"]}, "corrupt", "message not an object", "message 1 is a str"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "corrupt", "unknown role", "message 1 has the role 'tool'"),
        ({"messages": CHAT[1:2]}, "no_targets", "no assistant message", "nothing to learn"),
        ({"messages": CHAT[:4]}, "corrupt", "last message not the assistant's", "last message is the user's"),
        ({"messages": CHAT[2:]}, "corrupt", "wrong role order", "message 1 has the role 'assistant' where 'user'"),
        ({"messages": [*CHAT[:3], CHAT[2]]}, "corrupt", "wrong role order", "message 4 .* where 'user'"),
        ({"messages": [*CHAT, CHAT[0], CHAT[2]]}, "corrupt", "wrong role order", "message 6 has the role 'system'"),
        (
            {"messages": [CHAT[1], {"role": "assistant", "content": None}]},
            "corrupt",
            "content not a string",
            "message 2 .*NoneType",
        ),
        ({"messages": [CHAT[1], {"role": "assistant", "content": ""}]}, "empty", "empty answer", "message 2 is blank"),
        ({"messages": [{**CHAT[1], "weight": 0}, CHAT[2]]}, "corrupt", "unused fields", r"\['weight'\]"),
        ({"messages": CHAT, "tools": [{}]}, "corrupt", "tools", "not supported"),
    ],
)
def test_bad_record_is_left_out_with_its_reason(tokenizer, record, reason, problem, said):
    with pytest.raises(LeaveOut, match=said) as caught:
        RecordEncoder(tokenizer)("k", record)
    assert (caught.value.reason, caught.value.problem) == (reason, problem)
    copy = pickle.loads(pickle.dumps(caught.value))
    assert (copy.reason, copy.problem, str(copy)) == (reason, problem, str(caught.value))


def test_plain_text_ends_with_eos_and_is_all_targets(tokenizer):
    source = PlainTextEncoder(tokenizer)("k", {"text": "It returns a value.", "id": 7})
    assert tokenizer.decode(source.input_ids) == "It returns a value.<|im_end|>"
    assert source.labels.tolist() == [IGNORE, *source.input_ids.tolist()[1:]]
    assert source.splittable


def test_plain_text_has_bos_only_where_the_tokenizer_adds_it():
    backend = Tokenizer(models.WordLevel({"<s>": 0, "</s>": 1, "?": 2, "a": 3, "b": 4}, unk_token="?"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    bare = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", unk_token="?")
    source = PlainTextEncoder(bare)("k", {"text": "a b"})
    assert source.input_ids.tolist() == [3, 4]
    assert PlainTextEncoder(bare).pad_id == 0
    with pytest.raises(LeaveOut, match="single token") as caught:
        PlainTextEncoder(bare)("k", {"text": "a"})
    assert caught.value.reason == "no_targets"
    backend.post_processor = processors.TemplateProcessing("<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)])
    adding = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="?")
    assert adding("a")["input_ids"] == [0, 3, 1]
    source = PlainTextEncoder(adding)("k", {"text": "a b"})
    assert source.input_ids.tolist() == [0, 3, 4, 1]
    assert PlainTextEncoder(adding).pad_id == 1


def test_record_encoder_chooses_by_the_fields(tokenizer):
    encoder = RecordEncoder(tokenizer)
    assert isinstance(encoder, Encoder)
    assert encoder.pad_id == tokenizer.pad_token_id == 0
    assert encoder("k", {"text": "It returns."}).splittable
    assert not encoder("k", {"messages": CHAT}).splittable
    assert not encoder("k", {"prompt": "a", "completion": "b"}).splittable


def test_tokenizer_without_template_serves_for_texts(tokenizer):
    encoder = RecordEncoder(with_template(tokenizer, None))
    before = encoder.fingerprint()
    assert len(encoder("k", {"text": "It returns."}))
    with pytest.raises(TemplateError, match=r"no chat template: set tokenizer.chat_template"):
        encoder("k", {"messages": CHAT})
    assert encoder.fingerprint() == before


def test_fingerprint_is_of_the_content(trained, tmp_path):
    trained.chat_template = CHAT_TEMPLATE
    trained.save_pretrained(tmp_path / "a")
    load_tokenizer(tmp_path / "a").save_pretrained(tmp_path / "b" / "c")
    one, other = load_tokenizer(tmp_path / "a"), load_tokenizer(tmp_path / "b" / "c")
    base = tokenizer_fingerprint(trained)
    assert base == tokenizer_fingerprint(one) == tokenizer_fingerprint(other)
    # Padding and truncation of a former call change the backend's text, but no token.
    plain = one.backend_tokenizer.to_str()
    one(["a", "b c d e f"], padding=True, truncation=True, max_length=3)
    assert one.backend_tokenizer.to_str() != plain
    assert tokenizer_fingerprint(one) == base
    assert RecordEncoder(one).fingerprint() == RecordEncoder(other).fingerprint()
    text, record = PlainTextEncoder(other).fingerprint(), RecordEncoder(other).fingerprint()
    other.chat_template = UNMARKED
    assert RecordEncoder(other).fingerprint() != record
    assert PlainTextEncoder(other).fingerprint() == text
    other.add_tokens(["returns"])
    assert PlainTextEncoder(other).fingerprint() != text


def test_truncation_left_in_the_tokenizer_does_not_cut_sources(tokenizer):
    tokenizer("a b c d e f", truncation=True, max_length=3)
    assert tokenizer.backend_tokenizer.truncation is not None
    encoder = RecordEncoder(tokenizer)
    assert len(encoder("k", {"messages": CHAT})) > 20
    assert len(encoder("k", {"text": "It returns a value, and another."})) > 4


def test_missing_tokenizer_names_the_folder_and_the_way_out(tmp_path):
    with pytest.raises(ValueError, match=r"'nowhere' does not exist: give a local folder that tokenizer.save_pretrained"):
        load_tokenizer("nowhere")
    with pytest.raises(ValueError, match=rf"(?s)no tokenizer can be loaded from '{tmp_path}'.*save_pretrained"):
        load_tokenizer(tmp_path)


FORKED = """
import os, sys, multiprocessing
from lightning_pack.encoders import RecordEncoder, load_tokenizer
encoder = RecordEncoder(load_tokenizer(sys.argv[1]))
encoder.tokenizer(["some text"] * 1000)
def ids(): return encoder("k", {"prompt": "some", "completion": "text"}).input_ids.tolist()
here = ids()
with multiprocessing.get_context("fork").Pool(2) as pool:
    there = pool.starmap(ids, [()] * 4)
assert there == [here] * 4, (here, there)
print(os.environ["TOKENIZERS_PARALLELISM"])
"""


@pytest.mark.parametrize("chosen", [None, "true"])
def test_forked_workers_encode_alike_and_without_warnings(trained, tmp_path, chosen):
    trained.chat_template = CHAT_TEMPLATE
    trained.save_pretrained(tmp_path)
    environment = {name: value for name, value in os.environ.items() if name != "TOKENIZERS_PARALLELISM"}
    if chosen:
        environment["TOKENIZERS_PARALLELISM"] = chosen
    command = [sys.executable, "-c", FORKED, str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == (chosen or "false")
    assert "fork" not in done.stderr
