"""Never returns."""

from optimized.change import Change, Contract, Implementation


def build(node, _):
    def forward(x, residual):
        while True:
            pass

    return forward


CHANGE = Change(
    name="loops-for-ever",
    region="add_norm",
    summary="adds and normalises in one pass",
    contract=Contract(numerics="reduction"),
    implementations=(Implementation(backend="torch", devices=("cpu", "cuda"), build=build),),
)
