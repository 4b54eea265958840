"""Proposes the changes that exist in optimized/, ordered by what the trace says they can gain."""

from agents.proposers.base import Context, Suggestion, suggest
from optimized.catalog import changes
from optimized.change import nodes, served


class Catalog:
    name = "catalog"

    def propose(self, context: Context) -> list[Suggestion]:
        """Every catalogued change for a traced region that this device can run and that serves a
        node of the model.

        Where a change has several implementations, the first that was not tried stands for it, so
        that the next one gets its turn only after that was refused. A change around others waits
        until nothing inside is left to try, and is predicted to gain what those left of it.
        """
        by_region = {o.region: o for o in context.opportunities}
        suggestions = []
        for change in changes().values():
            opportunity = by_region.get(change.region)
            if opportunity is None:
                continue
            if change.around:
                opportunity = context.left(opportunity)
            opportunity = context.expected(opportunity, around=change.around)
            share = (context.around if change.around else context.free)(change.region)
            if not share:
                continue
            for implementation in change.implementations:
                if context.device_type not in implementation.devices:
                    continue
                if context.was_tried(change.region, implementation.backend, change.name):
                    continue
                ours = len(served(context.model, change.region, implementation))
                if not ours:
                    continue
                share *= ours / len(nodes(context.model, change.region))
                backend = implementation.backend
                suggestions.append(suggest(opportunity, change, backend, change.summary, share))
                break
        waiting = {s.change.region for s in suggestions}
        ready = [
            s
            for s in suggestions
            if not (s.change.around and waiting.intersection(by_region[s.change.region].contains))
        ]
        return sorted(ready, key=lambda s: -s.proposal.predicted_us)
