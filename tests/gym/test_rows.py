"""Field case F12: only LF ends a line, nothing of the content is changed, and a bad line is named."""

import gzip
import json

import pytest

from gymloop.errors import ConfigError
from gymloop.gym.rows import check_row, read_demonstrations, read_jsonl, read_rows

TOOLS = {"toy": [{"type": "function", "name": "wx", "description": "d", "parameters": {}}], "open": None}


def row(name: str, content: str) -> bytes:
    value = {
        "id": name,
        "responses_create_params": {"input": [{"role": "user", "content": content}]},
        "agent_ref": {"type": "responses_api_agents", "name": "toy"},
    }
    return json.dumps(value, ensure_ascii=False).encode()


PROMPTS = {"r1": "one", "r2": "one\u2028two", "r3": "one\u0085two", "r4": "a \U0001f469\u200d\U0001f52c", "r6": "last"}
LINES = [
    b"\xef\xbb\xbf" + row("r1", PROMPTS["r1"]) + b"\r\n",
    row("r2", PROMPTS["r2"]) + b"\r\n",
    row("r3", PROMPTS["r3"]) + b"\n",
    b"\n",
    row("r4", PROMPTS["r4"]) + b"\n",
    b'{"id": "r5", "responses_create_params": {"input": "cut\n',
    row("r6", PROMPTS["r6"]),
]


def file(tmp_path, data: bytes):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(data)
    return path


def test_f12_the_bad_line_is_named_counting_lf_only(tmp_path):
    with pytest.raises(ConfigError, match=r"rows\.jsonl, line 6 is not JSON: "):
        read_rows(file(tmp_path, b"".join(LINES)), TOOLS)


def test_f12_contents_arrive_bit_exact(tmp_path):
    rows = read_rows(file(tmp_path, b"".join(LINES[:5] + LINES[6:])), TOOLS)
    assert {row["id"]: row["responses_create_params"]["input"][0]["content"] for row in rows} == PROMPTS
    assert [row["id"] for row in rows] == ["r1", "r2", "r3", "r4", "r6"]
    assert list(rows[0]) == ["id", "responses_create_params", "agent_ref"]


@pytest.mark.parametrize("data", [b"", b"\n\n\r\n  \n", b"\xef\xbb\xbf"])
def test_f12_a_file_without_rows_is_said(tmp_path, data):
    with pytest.raises(ConfigError, match=r"rows\.jsonl: no rows"):
        read_jsonl(file(tmp_path, data))


def test_f12_gzip_and_absent_files_are_named(tmp_path):
    with pytest.raises(ConfigError, match=r"rows\.jsonl: is gzip-compressed"):
        read_jsonl(file(tmp_path, gzip.compress(LINES[6])))
    with pytest.raises(ConfigError, match=r"none\.jsonl: cannot be read: No such file"):
        read_jsonl(tmp_path / "none.jsonl")
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        read_jsonl(tmp_path)


def test_bytes_that_are_not_utf8_and_values_that_are_not_objects_are_named(tmp_path):
    with pytest.raises(ConfigError, match="line 1 is not JSON"):
        read_jsonl(file(tmp_path, '{"id": "é"}'.encode("latin-1")))
    with pytest.raises(ConfigError, match="line 2 is a JSON list; expected an object"):
        read_jsonl(file(tmp_path, b"{}\n[1]\n"))


def test_several_bad_lines_are_told_together_five_at_most(tmp_path):
    with pytest.raises(ConfigError) as caught:
        read_jsonl(file(tmp_path, b"{}\n" + b"x\n" * 7))
    assert [f"line {number} is not JSON" in str(caught.value) for number in range(1, 9)] == [False] + [True] * 5 + [
        False
    ] * 2
    assert str(caught.value).endswith("and 2 more")


def test_a_row_without_tools_gets_its_environments(tmp_path):
    rows = read_rows(file(tmp_path, row("r1", "x")), TOOLS)
    assert rows[0]["responses_create_params"]["tools"] == TOOLS["toy"]


def good(**params) -> dict:
    return {"responses_create_params": {"input": "x", **params}, "agent_ref": {"name": "toy"}}


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (good(), None),
        (good(tools=[{"type": "function", "name": "wx"}]), None),
        ({}, "responses_create_params is None; expected an object with 'input'"),
        (good(input=""), "responses_create_params.input is empty"),
        (good(input=[]), "responses_create_params.input is []; expected text or a list of messages"),
        (good(input=[{"role": "usr", "content": "x"}]), "input[0].role is 'usr'; expected one of"),
        (good(input=[{"role": "user", "content": None}]), "input[0].content is None; expected text"),
        (good(input=[{"type": "reasoning", "summary": []}, {"role": "user", "content": "x"}]), None),
        (good(input=[{"type": "image"}]), "input[0].type is 'image'; expected message"),
        (good(input=[{"type": "function_call", "name": "a"}]), "input[0].call_id is None; expected text"),
        (good(max_output_tokens=0), "max_output_tokens is 0"),
        (good(metadata={"extra_body": '{"top_k": 5}'}), "metadata.extra_body is not supported"),
        (good(tools=[{"type": "function", "function": {}}]), "tools[0] is {"),
        (good(tools=[{"type": "function", "name": "wxx"}]), "'toy' has no tool 'wxx' (did you mean 'wx'?)"),
        ({**good(), "agent_ref": None}, "agent_ref is None; expected an object with 'name'"),
        ({**good(), "agent_ref": {"name": "toi"}}, "not an environment of this run (did you mean 'toy'?)"),
    ],
)
def test_what_is_wrong_with_a_row_is_one_sentence(value, said):
    problem = check_row(value, TOOLS)
    assert problem is None if said is None else said in problem


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"\x28\xb5\x2f\xfd....", "is zstd-compressed"),
        (b"BZh91AY", "is bzip2-compressed"),
        (b"\xfd7zXZ\x00", "is xz-compressed"),
        (b"PK\x03\x04..", "is a zip archive"),
        (b"PAR1..", "is a Parquet file"),
        ('{"a": 1}\n'.encode("utf-16"), "is UTF-16"),
    ],
)
def test_f12_other_files_that_go_by_the_name_of_jsonl_are_told_what_they_are(tmp_path, data, said):
    with pytest.raises(ConfigError, match=rf"rows\.jsonl: {said}; expected plain JSON Lines in UTF-8"):
        read_jsonl(file(tmp_path, data))


def test_f12_lines_that_are_not_json_and_rows_that_do_not_fit_are_told_together_in_order(tmp_path):
    lines = [row("r1", "x"), b"{}", b"[1]", row("r2", "x"), b"cut"]
    with pytest.raises(ConfigError) as caught:
        read_rows(file(tmp_path, b"\n".join(lines)), TOOLS)
    said = str(caught.value)
    parts = ("line 2: responses_create_params is None", "line 3 is a JSON list", "line 5 is not JSON")
    assert [said.find(part) for part in parts] == sorted(said.find(part) for part in parts)
    assert all(part in said for part in parts)


def test_two_rows_of_one_id_are_named_with_both_lines_and_copies_of_a_row_repeat_it(tmp_path):
    repeated = [row("r1", "x"), row("r1", "x"), row("r2", "x")]
    assert len(read_rows(file(tmp_path, b"\n".join(repeated)), TOOLS)) == 3
    with pytest.raises(ConfigError, match=r"line 3: id 'r1' is also that of line 1, which is another row"):
        read_rows(file(tmp_path, b"\n".join([row("r1", "x"), row("r2", "x"), row("r1", "y")])), TOOLS)


def test_rows_without_an_id_may_be_as_many_as_they_like(tmp_path):
    plain = json.dumps(good()).encode()
    assert len(read_rows(file(tmp_path, b"\n".join([plain, plain])), TOOLS)) == 2
    with pytest.raises(ConfigError, match=r"line 1: id is \[1\]; expected text or a whole number"):
        read_rows(file(tmp_path, json.dumps({**good(), "id": [1]}).encode()), TOOLS)


def test_demonstrations_need_messages(tmp_path):
    sound = b'{"messages": [{"role": "user", "content": "x"}]}'
    assert len(read_demonstrations(file(tmp_path, sound))) == 1
    with pytest.raises(ConfigError, match=r"line 2: messages is None; expected a list of messages"):
        read_demonstrations(file(tmp_path, sound + b"\n{}"))
