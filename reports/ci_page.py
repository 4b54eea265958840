"""What a check found, as Markdown for a job's summary and as JUnit XML for its test view."""

from typing import TYPE_CHECKING
from xml.etree import ElementTree

from reports.regression import Finding, Outcome
from reports.render import cell

if TYPE_CHECKING:
    from reports.ci import Report


def markdown(report: "Report") -> str:
    """The outcome in one line, then a row a finding, with details one click away."""
    here = report.current
    rows = [
        f"| {cell(f.name)} | {'**' if f.regression else ''}{f.outcome}"
        f"{'**' if f.regression else ''} | {cell(f.words)} |"
        for f in report.findings
    ]
    lines = [
        f"## Regression check: {cell(here.model)} {cell(here.preset)}, {here.target}",
        "",
        f"**{headline(report)}** Baseline {cell(report.baseline)}; current: {_current(report)}.",
        "",
        "| Finding | Outcome | |",
        "|---|---|---|",
        *rows,
    ]
    if left := unseen(report):
        names = ", ".join(finding.name for finding in left)
        lines += ["", f"> **Not compared: {names}.** A change there passes this check unseen."]
    for finding in report.findings:
        if finding.details:
            lines += ["", f"<details><summary>{cell(finding.name)}</summary>", ""]
            lines += [f"- {cell(detail)}" for detail in finding.details]
            lines += ["", "</details>"]
    return "\n".join(lines) + "\n"


def headline(report: "Report") -> str:
    if report.regressions:
        what = ", ".join(
            f"{f.name} {'got slower' if f.outcome is Outcome.SLOWER else 'changed'}"
            for f in report.regressions
        )
        return f"Regression: {what}."
    judged = [f for f in report.findings if f.name != "environment"]
    left = [f.name for f in unseen(report)]
    if len(left) == len(judged):
        return "Nothing was compared."
    if left:
        return f"No regression in what was compared; not compared: {', '.join(left)}."
    return "No regression."


def unseen(report: "Report") -> list[Finding]:
    """What was not compared, though a regression could lie there."""
    return [f for f in report.findings if f.outcome is Outcome.UNKNOWN and f.name != "environment"]


def _current(report: "Report") -> str:
    here = report.current.environment
    where = f" on {cell(here.device_name)}" if here else ""
    commit = here.git_commit if here and here.git_commit else None
    return (f"commit {cell(commit)[:20]}" if commit else "no commit") + where


def junit(report: "Report") -> str:
    """One test case a finding: failed by a regression, skipped where nothing was compared."""
    here = report.current
    suite = ElementTree.Element(
        "testsuite",
        name="regression",
        tests=str(len(report.findings)),
        failures=str(len(report.regressions)),
        skipped=str(sum(f.outcome is Outcome.UNKNOWN for f in report.findings)),
        errors="0",
        time=f"{report.seconds:.3f}",
    )
    group = f"{here.model}.{here.preset}.{here.target}"
    for finding in report.findings:
        case = ElementTree.SubElement(suite, "testcase", classname=group, name=finding.name)
        _result(case, finding)
    root = ElementTree.Element("testsuites")
    root.append(suite)
    ElementTree.indent(root)
    text = ElementTree.tostring(root, encoding="unicode")
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{text}\n'


def _result(case: ElementTree.Element, finding: Finding) -> None:
    if finding.regression:
        failure = ElementTree.SubElement(case, "failure", message=finding.words)
        failure.text = "\n".join(finding.details) or finding.words
    elif finding.outcome is Outcome.UNKNOWN:
        ElementTree.SubElement(case, "skipped", message=finding.words)
    else:
        ElementTree.SubElement(case, "system-out").text = f"{finding.outcome}: {finding.words}"
