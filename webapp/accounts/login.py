"""Login: Django's view with a rate limit on attempts."""

from django.contrib.auth.decorators import login_not_required
from django.contrib.auth.forms import AuthenticationForm
from django.contrib.auth.views import LoginView
from django.http import HttpRequest, HttpResponse
from django.http.response import HttpResponseBase
from django.utils.decorators import method_decorator
from django.views.decorators.cache import never_cache
from django.views.decorators.debug import sensitive_post_parameters

from webapp.accounts.hashers import refusal_even_out
from webapp.accounts.login_rate_limit import tries_forgive, try_begin
from webapp.accounts.models import LoginTry
from webapp.accounts.session_signals import address_of
from webapp.core.problems import BusyProblem


class GuardedLogin(LoginView):
    """The login page; after too many attempts it shows how long to wait."""

    tried: LoginTry

    @method_decorator(login_not_required)
    @method_decorator(sensitive_post_parameters())
    @method_decorator(never_cache)
    def dispatch(self, request: HttpRequest, *args: str, **kwargs: object) -> HttpResponseBase:
        """Run Django's view without its second check of the CSRF token.

        The middleware has checked it; the view's check would store the secret in a session.
        """
        return super(LoginView, self).dispatch(request, *args, **kwargs)

    def post(self, request: HttpRequest, *args: str, **kwargs: object) -> HttpResponse:
        """Count the attempt, then check the password."""
        try:
            self.tried = try_begin(
                name=request.POST.get("username", ""), address=address_of(request)
            )
        except BusyProblem as problem:
            return self._wait(problem)
        return super().post(request, *args, **kwargs)

    def get_form(self, form_class: type[AuthenticationForm] | None = None) -> AuthenticationForm:
        """Return the form; a logged-in user starts in the password field."""
        form = super().get_form(form_class)
        if self.request.user.is_authenticated:
            form.fields["username"].widget.attrs.pop("autofocus", None)
            form.fields["password"].widget.attrs["autofocus"] = True
        return form

    def form_invalid(self, form: AuthenticationForm) -> HttpResponse:
        """Reject the login, with the same response time for every kind of name."""
        refusal_even_out(self.request.POST.get("username", ""), form.data.get("password", ""))
        return super().form_invalid(form)

    def form_valid(self, form: AuthenticationForm) -> HttpResponse:
        """Log the user in."""
        tries_forgive(self.tried)
        return super().form_valid(form)

    def _wait(self, problem: BusyProblem) -> HttpResponse:
        form = self.get_form_class()(self.request)
        context = self.get_context_data(form=form, wait=problem.detail)
        response = self.render_to_response(context, status=problem.status)
        response["Retry-After"] = str(problem.facts["retry_after_seconds"])
        return response
