# SPDX-License-Identifier: MIT
"""The ledger: each engine's share of a device, across one user's processes and containers."""

from pyvmem.ledger.accounts import (
    Account,
    EngineInfo,
    Ledger,
    LedgerError,
    LedgerHeld,
    default_folder,
    device_of,
    devices,
    engine_name,
    is_off,
    named_folder,
    private,
)
from pyvmem.ledger.participant import Participant, weakly

__all__ = [
    "Account",
    "EngineInfo",
    "Ledger",
    "LedgerError",
    "LedgerHeld",
    "Participant",
    "default_folder",
    "device_of",
    "devices",
    "engine_name",
    "is_off",
    "named_folder",
    "private",
    "weakly",
]
