"""The HTTP application: the table of routes behind guard, in one envelope."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.openapi.utils import get_openapi
from fastapi.routing import APIRoute

from cpuos.server.control_plane import ControlPlane
from cpuos.server.envelope import VERSION, Envelope, install_error_handlers
from cpuos.server.guard import Guard, Route
from cpuos.server.routes.table import ROUTES
from cpuos.types.error import ErrorBody

__all__ = ["create_app", "openapi"]


def create_app(plane: ControlPlane) -> FastAPI:
    """The application on an opened control plane."""
    app = _app()
    app.state.plane = plane
    for route in ROUTES:
        _add(app, route, guard=plane.guard)
    return app


def openapi() -> dict[str, Any]:
    """The API's description; needs no running part."""
    app = _app()
    for route in ROUTES:
        _add(app, route, guard=None)
    return app.openapi()


def _app() -> FastAPI:
    app = FastAPI(
        title="cpuOS",
        version=VERSION,
        summary="Control plane: sandboxes, tickets, audit.",
        openapi_url="/v1/openapi.json",
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    install_error_handlers(app)
    app.add_middleware(Envelope)
    app.openapi = lambda: _describe(app)  # type: ignore[method-assign]
    return app


def _add(app: FastAPI, route: Route, *, guard: Guard | None) -> None:
    app.router.add_api_route(
        route.path,
        route.handler,
        methods=[route.method],
        status_code=route.status,
        operation_id=route.handler.__name__,
        tags=[route.path.split("/")[2]],
        responses=_error_answers(route),
        openapi_extra=_extra(route),
        route_class_override=_guarded(route, guard) if guard is not None else APIRoute,
    )


def _guarded(route: Route, guard: Guard) -> type[APIRoute]:
    """A route class whose handler runs behind guard, before anything of the request is read."""

    class GuardedRoute(APIRoute):
        def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
            handle = super().get_route_handler()

            async def handle_guarded(request: Request) -> Response:
                return await guard.run(route, request, handle)

            return handle_guarded

    return GuardedRoute


def _error_answers(route: Route) -> dict[int | str, dict[str, Any]]:
    answers: dict[int | str, dict[str, Any]] = {
        "default": {"model": ErrorBody, "description": "An error; see the errors page."},
        422: {"model": ErrorBody, "description": "A value in the request is not acceptable."},
    }
    if route.permission is not None:
        answers[401] = {"model": ErrorBody, "description": "The key is missing or not known."}
    return answers


def _extra(route: Route) -> dict[str, Any]:
    extra: dict[str, Any] = {}
    if route.permission is not None:
        extra |= {"security": [{"key": []}], "x-permission": route.permission.value}
    if route.audit is not None:
        extra["x-audit"] = route.audit
    if route.replay is not None:
        schema = {"type": "string", "minLength": 1, "maxLength": 255}
        text = "A repeat with the same key and body answers what the first call answered."
        header = {"name": "Idempotency-Key", "in": "header", "required": False, "schema": schema, "description": text}
        extra["parameters"] = [header]
    return extra


def _describe(app: FastAPI) -> dict[str, Any]:
    if app.openapi_schema is None:
        schema = get_openapi(title=app.title, version=app.version, summary=app.summary, routes=app.routes)
        parts = schema.setdefault("components", {})
        parts["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer", "description": "An API key, cpk_…"}}
        app.openapi_schema = schema
    return app.openapi_schema
