# Copyright 2026 rspec_planner authors
#
# Licensed under the Apache License, Version 2.0 (the "License");
# you may not use this file except in compliance with the License.
# You may obtain a copy of the License at
#
#     http://www.apache.org/licenses/LICENSE-2.0
#
# Unless required by applicable law or agreed to in writing, software
# distributed under the License is distributed on an "AS IS" BASIS,
# WITHOUT WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied.
# See the License for the specific language governing permissions and
# limitations under the License.
"""
The ROS 2 lifecycle node `rspec_planner`: cameras and odometry in, reasoning and trajectory out.

Wires the pieces and moves them through the lifecycle; what a cycle does is in cycle.py, what is
said about it in diagnostics.py. One executor thread runs the callbacks, one worker thread owns the
model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
import time
import traceback
from typing import Any

from diagnostic_msgs.msg import DiagnosticArray
from rclpy.clock import Clock, JumpThreshold, TimeJump
from rclpy.clock_type import ClockType
from rclpy.duration import Duration
from rclpy.lifecycle import LifecycleNode, LifecycleState, TransitionCallbackReturn
from rclpy.qos import QoSProfile

from rspec_planner.configured import Configured
from rspec_planner.cycle import (
    CycleResult,
    Outcome,
    PlanningCycle,
    RateLimit,
)
from rspec_planner.diagnostics import (
    engine_status,
    EngineFacts,
    make_array,
)
from rspec_planner.errors import ConfigurationError, RspecError
from rspec_planner.graph import rivals
from rspec_planner.inputs import InputWatch
from rspec_planner.loading import engine_values, load_live_planner, memory_values, warm_up
from rspec_planner.message_sets import load_message_set
from rspec_planner.output_check import OutputCheck
from rspec_planner.outputs import Outputs, quiet_events
from rspec_planner.overlay_publisher import OverlayPublisher
from rspec_planner.parameter_handler import ParameterHandler
from rspec_planner.parameters import NODE_NAME, NodeParameters
from rspec_planner.planner.buffers import ObservationBuffer, SelectionLimits
from rspec_planner.process import run_node
from rspec_planner.subscriptions import InputSubscriptions
from rspec_planner.worker import Worker

SUCCESS, FAILURE = TransitionCallbackReturn.SUCCESS, TransitionCallbackReturn.FAILURE

#: a jump forward by more than this is a new recording, not a slow computer
_FORWARD_JUMP_S = 2.0
_THROTTLE_S = 5.0
_STOP_S = 10.0


class RspecPlanner(LifecycleNode):
    """
    Plan from cameras and odometry; see the README for topics and parameters.

    `load` builds the planner from the parameters on the worker's thread; tests give their own.
    """

    def __init__(self, load: Callable[[NodeParameters], Any] = load_live_planner, *,
                 arguments: Sequence[str] | None = None, **options: Any) -> None:
        super().__init__(NODE_NAME, namespace='planning', **options)
        self._load = load
        self._handler = ParameterHandler(self, self._swap_parameters, arguments)
        self._config: NodeParameters | None = None
        self._made: Configured | None = None
        self._engine = EngineFacts('unconfigured')
        self._watch = InputWatch()
        self._limit = RateLimit()
        self._newest_t0_ns = 0
        self._last_reset = ''
        self._logged_errors: set[str] = set()
        self._worker: Worker[int] = self._new_worker()
        self._diagnostics = self.create_publisher(DiagnosticArray, '/diagnostics',
                                                  QoSProfile(depth=10),
                                                  event_callbacks=quiet_events())
        # Steady time: under a paused /clock the node must still say what it is waiting for.
        self._beat = self.create_timer(1.0, self._on_beat,
                                       clock=Clock(clock_type=ClockType.STEADY_TIME))
        self._jump = self.get_clock().create_jump_callback(
            JumpThreshold(min_forward=Duration(seconds=_FORWARD_JUMP_S),
                          min_backward=Duration(nanoseconds=-1), on_clock_change=True),
            post_callback=self._on_clock_jump)

    # Lifecycle

    def start(self) -> bool:
        """Configure and activate when `autostart` asks for it; False when that failed."""
        if not self._handler.autostart:
            return True
        return self.trigger_configure() == SUCCESS and self.trigger_activate() == SUCCESS

    def on_configure(self, state: LifecycleState) -> TransitionCallbackReturn:
        """Read the parameters, load the model, warm it up, and create the topics."""
        try:
            self._config = self._handler.read()
            self._made = self._configure(self._config)
        except RspecError as error:
            self._set_engine(EngineFacts('failed', str(error)))
            self.get_logger().error(str(error))
            self._discard()
            return FAILURE
        except Exception as error:  # a defect must end in a state, not in a silent lifecycle
            self._set_engine(EngineFacts('failed', f'{type(error).__name__}: {error}'))
            self.get_logger().error(traceback.format_exc())
            self._discard()
            return FAILURE
        super().on_configure(state)
        return SUCCESS

    def on_activate(self, state: LifecycleState) -> TransitionCallbackReturn:
        """Accept data and plan."""
        super().on_activate(state)
        made = self._require()
        made.restart()
        made.inputs.enabled = True
        self.get_logger().info('active: planning')
        return SUCCESS

    def on_deactivate(self, state: LifecycleState) -> TransitionCallbackReturn:
        """Refuse data, let the worker become idle, and forget what was collected."""
        made = self._require()
        idle = self._forget('deactivated')  # first: a plan that ends now must find itself dropped
        made.inputs.enabled = False
        idle.result(_STOP_S)
        self.get_logger().info('inactive')
        super().on_deactivate(state)
        return SUCCESS

    def on_cleanup(self, state: LifecycleState) -> TransitionCallbackReturn:
        """Give the model and the topics back."""
        self._discard()
        self._set_engine(EngineFacts('unconfigured'))
        return SUCCESS

    def on_shutdown(self, state: LifecycleState) -> TransitionCallbackReturn:
        """End the worker."""
        self._discard()
        return SUCCESS

    def on_error(self, state: LifecycleState) -> TransitionCallbackReturn:
        """Return to unconfigured after an unexpected failure."""
        self._discard()
        return SUCCESS

    def close(self) -> None:
        """End the worker and take the node off the graph; safe in any state."""
        self._discard()
        self._jump.unregister()
        self.destroy_node()
        # rclpy leaves the state machine, whose handle keeps the node on the graph (rclpy 9.1.2).
        self._state_machine.destroy_when_not_in_use()

    def _configure(self, config: NodeParameters) -> Configured:
        """Build everything that the parameters decide; raises RspecError with the remedy."""
        load_message_set(config.output.message_set)  # refuses before the model is loaded
        self._set_engine(EngineFacts('loading', config.model.checkpoint))
        self._worker.start()
        started = time.perf_counter()
        planner = self._worker.call(lambda: self._load(config)).result()
        cameras = planner.profile.cameras
        if tuple(config.cameras.ids) != tuple(cameras.ids):
            raise ConfigurationError(
                f"'cameras.ids' {list(config.cameras.ids)} does not fit the checkpoint "
                f"'{config.model.checkpoint}', which needs {list(cameras.ids)}; correct the list")
        warm_up_ms = self._worker.call(lambda: warm_up(planner)).result()
        self._set_engine(EngineFacts('ready', values=engine_values(planner, config, {
            'load_s': time.perf_counter() - started, 'warm_up_ms': warm_up_ms})))
        self.get_logger().info(f"configured: '{config.model.checkpoint}' on "
                               f'{config.model.device}, warm-up {warm_up_ms:.0f} ms')
        check = None
        if config.speculation.enabled and config.speculation.check_every:
            check = self._worker.call(lambda: OutputCheck(
                planner, planner.alone(), config.speculation.check_every)).result()
        return self._connect(planner, config, check)

    def _connect(self, planner: Any, config: NodeParameters,
                 check: OutputCheck | None) -> Configured:
        """Put a loaded planner on the graph."""
        cameras = planner.profile.cameras
        buffer = ObservationBuffer(planner.profile, SelectionLimits(
            image_tolerance_ms=config.sync.image_tolerance_ms,
            odometry_max_gap_ms=config.sync.odometry_max_gap_ms,
            max_input_age_ms=config.sync.max_input_age_ms,
            image_buffer_mib=config.sync.image_buffer_mib), planner.tokenizer)
        inputs = InputSubscriptions(self, buffer, self._watch, self._expected_t0, self._trigger,
                                    self._reset)
        anchor = cameras.names[config.cameras.ids.index(config.sync.anchor_camera)]
        outputs = Outputs(self, config, OverlayPublisher(
            self, lambda t0_ns: buffer.frame_at(anchor, t0_ns), lambda: inputs.view(anchor)))
        cycle = PlanningCycle(check or planner, buffer, self._watch, self._now_ns,
                              outputs.publish_plan, outputs.publish_stop)
        inputs.create(config.cameras, cameras.names, anchor)
        streams = tuple(f'image{index}' for index in range(len(cameras.names)))
        return Configured(planner, buffer, inputs, outputs, cycle, streams, check)

    def _discard(self) -> None:
        """Undo configure, also half of it."""
        made, self._made = self._made, None
        if made is not None:
            made.inputs.destroy()
            made.cycle.invalidate()
            made.outputs.destroy()
        if not self._worker.stop(_STOP_S):
            self.get_logger().error(f'the worker did not end within {_STOP_S:.0f} s')
        if made is not None:
            made.buffer.decoder.close()  # after the worker, which still decodes
        self._worker = self._new_worker()
        self._watch = InputWatch()

    def _new_worker(self) -> Worker[int]:
        return Worker(self._run_cycle, self._on_worker_error)

    def _require(self) -> Configured:
        if self._made is None:
            raise ConfigurationError('the node is not configured; trigger configure first')
        return self._made

    def _swap_parameters(self, config: NodeParameters) -> None:
        """Take a changed configuration; a running cycle keeps the one it started with."""
        if self._made is not None:
            self._config = config
            self._made.outputs.parameters = config
            self._made.buffer.allow_age(config.sync.max_input_age_ms)

    # Trigger and cycle

    def _now_ns(self) -> int:
        return int(self.get_clock().now().nanoseconds)

    def _expected_t0(self) -> int | None:
        """
        Return the t0 whose frames are wanted now: that of a cycle which collects, or the next one.

        None while a plan is made: the frame of now may well be replaced by a newer one.
        """
        made = self._made
        if made is None:
            return None
        if self._worker.busy:
            return made.cycle.collecting_ns
        return self._newest_t0_ns if self._worker.waiting else self._limit.due_ns

    def _trigger(self, t0_ns: int) -> None:
        """Start a cycle for a frame of the anchor camera, on the executor's thread."""
        made, config = self._made, self._config
        if made is None or config is None:
            return
        if t0_ns > 0:
            if t0_ns < self._newest_t0_ns - _FORWARD_JUMP_S * 1e9:
                self._reset(f'stamps of the anchor camera went back by '
                            f'{(self._newest_t0_ns - t0_ns) / 1e9:.1f} s')
            self._newest_t0_ns = max(self._newest_t0_ns, t0_ns)
            if not self._limit.allows(t0_ns, config.planning.rate_hz):
                made.statistics.rate_limited += 1
                return
        if self._worker.submit(t0_ns):
            made.statistics.superseded += 1

    def _run_cycle(self, t0_ns: int) -> None:
        """Run one cycle, on the worker's thread."""
        made, config = self._made, self._config
        if made is None or config is None or not made.inputs.enabled:
            return
        awaited = made.buffer.awaited_stamps(t0_ns).values()
        result = made.cycle.run(t0_ns, config, dict(zip(made.camera_streams, awaited)))
        if made.inputs.enabled:
            made.outputs.publish_times(result)
            self._note(result)
            if made.check is not None:
                made.check.run()

    def _on_worker_error(self, error: Exception) -> None:
        """Turn what the planner raised into a diagnostic; log each kind of traceback once."""
        if self._made is None or not self.context.ok():
            return
        kind = f'{type(error).__name__}: {error}'
        if kind not in self._logged_errors:
            self._logged_errors.add(kind)
            self.get_logger().error('the planner raised; the next frame is tried again\n'
                                    + ''.join(traceback.format_exception(error)))
        fallback = self._made.cycle.fallback
        self._note(CycleResult(self._newest_t0_ns, Outcome.FAILED, 'exception', kind,
                               repeated=fallback == 'last_valid', stopped=fallback == 'stop'))

    def _note(self, result: CycleResult) -> None:
        """Count a finished cycle and say what became of it."""
        made, config = self._made, self._config
        if made is None or config is None or not self.context.ok():
            return
        made.outputs.publish_debug()
        made.statistics.count(result, config.deadline.budget_ms)
        made.last = result
        if result.outcome is not Outcome.SKIPPED:
            made.last_planned = result
        if result.outcome is Outcome.PUBLISHED:
            made.published_s = time.monotonic()
        elif result.outcome is not Outcome.FAILED:
            self.get_logger().warning(f'{result.outcome.value}: {result.reason}: {result.detail}',
                                      throttle_duration_sec=_THROTTLE_S)
        self._publish_diagnostics()

    # Discontinuities

    def _on_clock_jump(self, jump: TimeJump) -> None:
        seconds = jump.delta.nanoseconds / 1e9
        if jump.delta.nanoseconds >= self._now_ns():
            return  # the clock starts: what has come so far belongs to its time
        self._reset(f'clock jump of {seconds:+.1f} s')

    def _reset(self, reason: str) -> None:
        """Start afresh: buffers, mailbox, caches and the plan in progress belong to the past."""
        self._last_reset = f'reset: {reason}'
        self._newest_t0_ns = 0
        self._forget(reason)
        if self._made is not None:
            self.get_logger().info(self._last_reset)

    def _forget(self, reason: str) -> Any:
        """Drop all collected data; the returned future ends when the worker has done so."""
        self._limit.reset()
        self._watch.clear()
        self._worker.clear()
        made = self._made
        if made is None:
            return None
        made.buffer.clear(reason)
        made.cycle.invalidate()
        return self._worker.call(made.cycle.reset)

    # Diagnostics

    def _set_engine(self, facts: EngineFacts) -> None:
        self._engine = facts
        self._publish_diagnostics()

    def _on_beat(self) -> None:
        """Look at what changes slowly, once a second."""
        made, config = self._made, self._config
        if made is not None and config is not None:
            made.rivals = rivals(self, (self.resolve_topic_name('~/output/trajectory'),))
            self._engine = replace(self._engine, values={
                **self._engine.values, **memory_values(config.model.device)})
        self._publish_diagnostics()

    def _publish_diagnostics(self) -> None:
        """Send all five tasks; called once a second and after each cycle."""
        if not self.context.ok():
            return
        made, config = self._made, self._config
        statuses = [engine_status(self._engine)]
        if made is not None and config is not None:
            statuses += made.statuses(self._now_ns(), self._watch.states(), config,
                                      self._last_reset)
        self._diagnostics.publish(make_array(self._now_ns(), statuses))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the node until it is interrupted; return the exit code."""
    return run_node(lambda full: RspecPlanner(arguments=full), arguments)
