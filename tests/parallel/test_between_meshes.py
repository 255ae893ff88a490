"""A checkpoint of one mesh goes on on any other, as if there had been no other mesh."""

import pytest
from matrix import JOURNEYS, WITHIN, mesh_name, unknown


def journey(number, model, meshes):
    """A row of the table; `make test` takes the first two."""
    marks = [pytest.mark.xdist_group("ranks")] if number < 2 else [pytest.mark.matrix]
    reasons = [reason for mesh in meshes if (reason := unknown(mesh))]
    marks += [pytest.mark.skip(reason=f"there is no {reasons[0]}")] if reasons else []
    return pytest.param(model, meshes, id=f"{model}-{'-'.join(map(mesh_name, meshes))}", marks=marks)


@pytest.mark.parametrize(("model", "meshes"), [journey(number, *row) for number, row in enumerate(JOURNEYS)])
def test_a_run_goes_on_on_another_mesh(runner, model, meshes):
    difference = runner.travel(model, meshes)
    assert difference.largest <= WITHIN, difference.wrong()
