"""Proposes to compile regions with torch.compile, their BF16 casts kept. Works on any model."""

from agents.proposers.base import Context, Suggestion, suggest
from optimized.change import nodes
from optimized.inductor import inductor_change

BACKEND = "inductor"


class Inductor:
    name = "inductor"

    def propose(self, context: Context) -> list[Suggestion]:
        """The regions that still launch more kernels than they need, innermost first.

        A region around others is proposed once nothing smaller in it is left to try: small regions
        compile in seconds and are judged sharply, large ones neither. A region that could not gain
        a measurable amount is left out.
        """
        suggestions = []
        for opportunity in context.opportunities:
            region = opportunity.region
            if opportunity.launches_saved <= 0 or context.was_tried(region, BACKEND):
                continue
            share = context.free(region)
            if not share or share * opportunity.bound_us <= context.effect_us:
                continue
            opportunity = context.expected(opportunity)
            change = inductor_change(region)
            hypothesis = (
                f"compile {opportunity.region}: {opportunity.launches} launches a step, "
                f"{opportunity.launches_saved} of them to save"
            )
            suggestions.append(suggest(opportunity, change, BACKEND, hypothesis, share))
        return sorted(suggestions, key=lambda s: (depth(context, s), -s.proposal.predicted_us))


def depth(context: Context, suggestion: Suggestion) -> int:
    """How many levels of modules the region's nodes contain: 0 for a leaf."""
    region = nodes(context.model, suggestion.proposal.region)
    return max(
        inner.count(".") + 1 if inner else 0
        for node in region
        for inner, _ in context.model.get_submodule(node).named_modules()
    )
