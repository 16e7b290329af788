"""Types of MPI's objects, for annotations: importing `mpi4py.MPI` would start MPI."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mpi4py.MPI import Comm as Comm
    from mpi4py.MPI import Intracomm as Intracomm
    from mpi4py.MPI import Request as Request
else:
    Comm = Intracomm = Request = object
