"""The HTTP application: the table of routes behind guard, in one envelope."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.openapi.utils import get_openapi
from fastapi.routing import APIRoute
from starlette.routing import BaseRoute

from cpuos.server.control_plane import ControlPlane
from cpuos.server.envelope import VERSION, Envelope, install_error_handlers
from cpuos.server.guard import Route
from cpuos.server.routes.table import ROUTES
from cpuos.types.error import ErrorBody

__all__ = ["create_app", "create_routes", "openapi"]


def create_app(plane: ControlPlane, *, routes: Sequence[BaseRoute] | None = None) -> FastAPI:
    """The application on an opened control plane; with `routes` of `create_routes` where there are more of it."""
    app = _app(create_routes() if routes is None else routes)
    app.state.plane = plane
    return app


def create_routes() -> Sequence[BaseRoute]:
    """The table as it is served, by any control plane; the models of requests and answers that it makes take long."""
    router = APIRouter()
    for route in ROUTES:
        _add(router, route)
    return tuple(router.routes)


def openapi() -> dict[str, Any]:
    """The API's description; needs no running part."""
    return _app(create_routes()).openapi()


def _app(routes: Sequence[BaseRoute]) -> FastAPI:
    app = FastAPI(
        routes=list(routes),
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


def _add(router: APIRouter, route: Route) -> None:
    router.add_api_route(
        route.path,
        route.handler,
        methods=[route.method],
        status_code=route.status,
        operation_id=route.handler.__name__,
        tags=[route.path.split("/")[2]],
        responses=_error_answers(route),
        openapi_extra=_extra(route),
        route_class_override=_guarded(route),
    )


def _guarded(route: Route) -> type[APIRoute]:
    """A route class whose handler runs behind guard, before anything of the request is read."""

    class GuardedRoute(APIRoute):
        def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
            handle = super().get_route_handler()

            async def handle_guarded(request: Request) -> Response:
                plane: ControlPlane = request.app.state.plane
                return await plane.guard.run(route, request, handle)

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
