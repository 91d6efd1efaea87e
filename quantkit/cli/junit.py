"""JUnit's XML, which continuous integration reads: one test case for each obligation of each tier, one for the decision.

What was not compared is skipped, what was not met fails with the reason.
"""

from __future__ import annotations

import xml.etree.ElementTree as ET
from typing import TYPE_CHECKING

from quantkit.cli.output import visible

if TYPE_CHECKING:
    from quantkit.job.gate import GateResult, JudgedObligation


def gate_junit(result: GateResult) -> bytes:
    """The XML of a gate."""
    suite = ET.Element("testsuite", name="quantkit gate")
    for judged in result.obligations:
        case = ET.SubElement(suite, "testcase", classname=visible(judged.tier), name=judged.obligation.name)
        verdict = judged.obligation.verdict
        if verdict == "not compared":
            ET.SubElement(case, "skipped", message=visible(judged.obligation.reason or ""))
        elif verdict in ("worse", "not shown"):
            ET.SubElement(case, "failure", type=verdict, message=describe_obligation(judged))
    case = ET.SubElement(suite, "testcase", classname="gate", name="decision")
    if not result.commits:
        ET.SubElement(case, "failure", type=result.label, message=visible(result.reason or result.label))
    suite.set("tests", str(len(suite)))
    suite.set("failures", str(len(suite.findall("testcase/failure"))))
    suite.set("skipped", str(len(suite.findall("testcase/skipped"))))
    body: bytes = ET.tostring(suite, encoding="utf-8")
    return b'<?xml version="1.0" encoding="utf-8"?>\n' + body + b"\n"


def describe_obligation(judged: JudgedObligation) -> str:
    """One obligation as a sentence."""
    o = judged.obligation
    numbers = f"incumbent {o.incumbent}, candidate {o.candidate}, loss {o.loss}, margin {o.margin}, p {o.p_not_worse}"
    return visible(f"{judged.tier} {o.name}: {o.verdict}; {o.reason or numbers}")
