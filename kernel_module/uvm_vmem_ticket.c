// SPDX-License-Identifier: MIT OR GPL-2.0
//
// Tickets: BINDs that a GPU may still be executing.

#include <linux/ktime.h>
#include <linux/sched/signal.h>

#include "uvm_vmem_internal.h"

void uvm_vmem_ticket_free(uvm_vmem_state_t *state, uvm_vmem_ticket_t *ticket)
{
    uvm_assert_mutex_locked(&state->lock);

    list_del(&ticket->node);
    state->num_tickets--;
    uvm_tracker_deinit(&ticket->tracker);
    uvm_vmem_free(state, ticket);
}

// Free the oldest tickets that are finished.
static void tickets_reap(uvm_vmem_state_t *state)
{
    uvm_vmem_ticket_t *ticket, *next;

    list_for_each_entry_safe(ticket, next, &state->tickets, node) {
        if (!uvm_tracker_is_completed(&ticket->tracker))
            break;

        uvm_vmem_ticket_free(state, ticket);
    }
}

int uvm_vmem_ticket_alloc(uvm_vmem_state_t *state, uvm_vmem_ticket_t **ticket_out)
{
    uvm_vmem_ticket_t *ticket;

    ticket = uvm_vmem_alloc(state, sizeof(*ticket));
    if (!ticket)
        return -ENOMEM;

    INIT_LIST_HEAD(&ticket->node);
    uvm_tracker_init(&ticket->tracker);

    uvm_mutex_lock(&state->lock);

    tickets_reap(state);
    if (state->num_tickets >= UVM_VMEM_MAX_TICKETS) {
        uvm_mutex_unlock(&state->lock);
        uvm_vmem_free(state, ticket);
        return -EAGAIN;
    }

    state->num_tickets++;

    uvm_mutex_unlock(&state->lock);

    *ticket_out = ticket;
    return 0;
}

NvU64 uvm_vmem_ticket_publish(uvm_vmem_state_t *state, uvm_vmem_ticket_t *ticket)
{
    uvm_assert_mutex_locked(&state->lock);

    if (uvm_tracker_is_completed(&ticket->tracker)) {
        uvm_vmem_ticket_free(state, ticket);
        return 0;
    }

    ticket->number = ++state->last_ticket;
    list_add_tail(&ticket->node, &state->tickets);
    return ticket->number;
}

void uvm_vmem_ticket_drain(uvm_vmem_state_t *state)
{
    uvm_vmem_ticket_t *ticket;

    uvm_assert_rwsem_locked_write(&state->va_space->lock);

    // Without state->lock: no call is in flight, and WAIT reads tickets under the VA space lock. Waiting fails only
    // after a fatal error, and empties the trackers even then.
    (void)uvm_tracker_wait(&state->pending);
    list_for_each_entry(ticket, &state->tickets, node)
        (void)uvm_tracker_wait(&ticket->tracker);

    uvm_mutex_lock(&state->lock);
    tickets_reap(state);

    uvm_mutex_unlock(&state->lock);
}

// Returns 0 if the ticket is finished, -ETIMEDOUT if not, or -ENOENT or -EIO.
static int ticket_query(uvm_vmem_state_t *state, NvU64 number)
{
    uvm_vmem_ticket_t *ticket;
    int ret = 0;

    // Keep the GPUs registered: the trackers refer to their channels.
    uvm_va_space_down_read(state->va_space);
    uvm_mutex_lock(&state->lock);

    if (number > state->last_ticket)
        ret = -ENOENT;

    list_for_each_entry(ticket, &state->tickets, node) {
        if (ticket->number == number) {
            NV_STATUS status = uvm_tracker_query(&ticket->tracker);

            if (status == NV_WARN_MORE_PROCESSING_REQUIRED)
                ret = -ETIMEDOUT;
            else
                ret = uvm_vmem_errno(status, -EIO);
            break;
        }
    }

    if (ret == 0)
        tickets_reap(state);

    uvm_mutex_unlock(&state->lock);
    uvm_va_space_up_read(state->va_space);
    return ret;
}

int uvm_vmem_wait(uvm_vmem_state_t *state, const struct uvm_vmem_wait *params)
{
    NvU64 start = ktime_get_ns();

    if (params->flags)
        return -EOPNOTSUPP;

    // Between polls no lock is held, so that a GPU can be unregistered and other calls can bind.
    while (true) {
        int ret = ticket_query(state, params->ticket);
        NvU64 waited = ktime_get_ns() - start;

        if (ret != -ETIMEDOUT || waited >= params->timeout_ns)
            return ret;

        if (fatal_signal_pending(current))
            return -EINTR;

        uvm_vmem_pause(waited, params->timeout_ns - waited);
    }
}
