"""The environments of NeMo Gym 0.7.0 that need no network, and what its recordings of each can prove.

The wheel ships five recorded rollouts per server, with the tool calls, the response and the reward. Where a recording
cannot be matched, ``except_rows`` says why: those rows have to differ, so that the reason is looked at again when they
do not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

# recorded: tool calls in a session, /verify with the recorded response, the recorded reward.
# steps: /reset and /step with each recorded message; the recorded observations and the recorded sum.
# played: the state is random, so a game is played to its end.
# solved: the recordings are of other rows; the ground truth of the row, called as tools, has to be worth 1.
Evidence = Literal["recorded", "steps", "played", "solved"]


@dataclass(frozen=True)
class Recorded:
    """One environment.

    Attributes:
        config: its file, where it is not ``<name>.yaml``.
        extras: what the server needs beyond NeMo Gym, as ``gymloop gym install --extra`` takes it.
        modules: by which it is known whether they are there.
        given: overrides, as under ``env.nemo_gym``.
        servers_only: its agent cannot start without a key of a model provider: only the servers of the file are hosted.
        except_rows: by line from 1, why the recorded reward is not this version's.
        undecided: by line, why the machine's speed decides the reward; these rows are not replayed.
        tries: sessions that a row has to get its reward.
        ray: hosted without the others, with a Ray to join.
        drops: fields of the recorded response that this version refuses.
    """

    name: str
    evidence: Evidence = "recorded"
    config: str = ""
    extras: Sequence[str] = ()
    modules: Sequence[str] = ()
    given: Mapping[str, Any] = field(default_factory=dict)
    servers_only: bool = False
    except_rows: Mapping[int, str] = field(default_factory=dict)
    undecided: Mapping[int, str] = field(default_factory=dict)
    tries: int = 1
    ray: bool = False
    drops: Sequence[str] = ()

    @property
    def config_path(self) -> str:
        return f"resources_servers/{self.name}/configs/{self.config or self.name + '.yaml'}"


MATH: dict[str, Any] = {"extras": ("math-verify",), "modules": ("math_verify",), "tries": 4}
"""math-verify gives an answer 5 s of wall time, which one can take on a busy machine: then it is worth nothing."""

ENVIRONMENTS = (
    Recorded("workplace_assistant", "solved"),
    Recorded("example_single_tool_call"),
    Recorded("example_session_state_mgmt"),
    Recorded("example_multi_step"),
    Recorded("example_tool_call_multireward"),
    Recorded("blackjack", "played"),
    Recorded(
        "grl_sokoban",
        "steps",
        extras=("gymnasium==1.1.1", "gym-sokoban==0.0.6"),
        modules=("gymnasium", "gym_sokoban"),
    ),
    # Only its first piece is drawn from the row's seed.
    Recorded("grl_tetris", "played", extras=("gymnasium==1.1.1",), modules=("gymnasium",)),
    Recorded(
        "reasoning_gym",
        config="resources_only.yaml",
        extras=("reasoning-gym",),
        modules=("reasoning_gym",),
    ),
    Recorded(
        "math_with_judge",
        **MATH,
        undecided={2: "SymPy compares the two answers for about as long as math-verify gives it, 5 s of wall time"},
    ),
    Recorded("polymath", **MATH),
    Recorded(
        "math_with_autograder",
        **MATH,
        # Without a judge, as the others: its judge is a hosted model.
        given={
            "math_with_autograder": {
                "resources_servers": {
                    "math_with_autograder": {
                        "should_use_judge": False,
                        "judge_model_server": {"type": "responses_api_models", "name": "policy_model"},
                    }
                }
            }
        },
    ),
    Recorded("arc_agi"),
    Recorded("calendar"),
    Recorded("circle_click"),
    Recorded("citation_if"),
    Recorded("equivalence_rule", config="lc.yaml"),
    Recorded("format_verification", config="freeform_formatting.yaml"),
    Recorded("hotpotqa_qa"),
    Recorded("example_mcp_weather", servers_only=True),
    Recorded("mrcr", drops=("usage",)),  # recorded with the counts of a chat completion
    Recorded("nvarc", config="inductive.yaml"),
    Recorded("ragtruth"),
    Recorded("ruler2", extras=("editdistance",), modules=("editdistance",), drops=("usage",)),
    Recorded("single_step_tool_use_with_argument_comparison"),
    Recorded("spartqa"),
    Recorded("string_match"),
    Recorded(
        "structeval",
        config="structeval_nonrenderable.yaml",
        extras=("xmltodict", "toml"),
        modules=("xmltodict", "toml"),
    ),
    Recorded("xlam_fc"),
    Recorded("bunsenbench_chemistry_mcq"),
    Recorded("imo_gradingbench"),
    Recorded("proof_genselect"),
    Recorded("math_proof_judgement"),
    Recorded(
        "mcqa", except_rows={3: "recorded before the server read an answer from a box with text behind the letter"}
    ),
    Recorded(
        "math_with_code",
        except_rows={5: "recorded before the server read an answer with braces inside its box"},
        tries=2,  # its calculator, too, counts wall time
    ),
    Recorded("code_gen", ray=True),
)

EXTRAS = tuple(sorted({extra for one in ENVIRONMENTS for extra in one.extras}))
"""All that the environments need, for one installation."""

if __name__ == "__main__":  # for `gymloop gym install`, in the Makefile
    print(*(part for extra in EXTRAS for part in ("--extra", extra)))
